from modules.text_generation import decode, encode


def token_encode(text):
    tokens = encode(text)[0].tolist()
    return {"tokens": tokens, "length": len(tokens)}


def token_decode(tokens):
    return {"text": decode(tokens)}


def token_count(text):
    return {"length": len(encode(text)[0])}
