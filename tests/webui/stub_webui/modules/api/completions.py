import time
from collections import deque

from modules import shared
from modules.chat import generate_chat_prompt, generate_chat_reply
from modules.text_generation import encode, generate_reply

from .errors import InvalidRequestError


def process_parameters(body):
    """The request's dict becomes the state of a generation."""
    params = body
    params["max_new_tokens"] = body.pop("max_tokens")
    params["truncation_length"] = params["truncation_length"] or shared.settings["truncation_length"]
    if params["temperature"] == 0:
        params.update(do_sample=False, top_k=1)
    stop = body.get("stop")
    params["custom_stopping_strings"] = [stop] if isinstance(stop, str) else stop or []
    logprobs = body.get("logprobs")
    if logprobs is True:
        logprobs = params["logprobs"] = max(body.get("top_logprobs") or 5, 1)
    if shared.args.loader != "llama.cpp":
        from modules.transformers_loader import LogitsBiasProcessor, LogprobProcessor
        from transformers import LogitsProcessorList

        processors = [LogitsBiasProcessor(body["logit_bias"])] if body.get("logit_bias") else []
        if logprobs:
            params["logprob_proc"] = LogprobProcessor(logprobs)
            processors.append(params["logprob_proc"])
        if processors:
            params["logits_processor"] = LogitsProcessorList(processors)
    return params


def _prompt_logprobs(ids, count):
    """What the model thought of the prompt's own tokens: by `get_prompt_logits`, or else by a pass through `forward`."""
    import torch

    model, tokens = shared.model, ids[0].tolist()
    with torch.inference_mode():
        logits = model.get_prompt_logits(ids) if hasattr(model, "get_prompt_logits") else model(input_ids=ids).logits
    scores = torch.log_softmax(logits[0, :-1].float(), dim=-1)
    texts = shared.tokenizer.batch_decode([[token] for token in tokens])
    entries = [(texts[0], None, None)]
    for at, token in enumerate(tokens[1:]):
        values, best = torch.topk(scores[at], k=max(count, 1))
        names = shared.tokenizer.batch_decode([[int(one)] for one in best])
        entries.append((texts[at + 1], scores[at, token].item(), dict(zip(names, values.tolist(), strict=True))))
    return entries


def _written(logprob_proc):
    for found in logprob_proc.token_alternatives_history if logprob_proc else ():
        best = next(iter(found))
        yield best, found[best], found


def _completion_logprobs(entries):
    if not entries:
        return None
    tokens, values, tops = zip(*entries, strict=True)
    offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _chat_logprobs(entries):
    def one(token, value):
        return {"token": token, "logprob": value, "bytes": list(token.encode())}

    content = [
        {**one(token, value), "top_logprobs": [one(*pair) for pair in tops.items()]} for token, value, tops in entries
    ]
    return {"content": content} if content else None


def _reason(prompt, new, params):
    return "length" if prompt + new >= params["truncation_length"] or new >= params["max_new_tokens"] else "stop"


def _response(kind, choice, prompt=0, new=0, done=True):
    usage = {"usage": {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}} if done else {}
    head = {"id": f"cmpl-{time.time_ns()}", "object": kind, "created": int(time.time()), "model": shared.model_name}
    return {**head, "choices": choice if isinstance(choice, list) else [choice], **usage}


def completions_common(body, stream=False, stop_event=None):
    params = process_parameters(body)
    limit = params["max_new_tokens"]
    if limit is None:
        params.update(max_new_tokens=512, auto_max_new_tokens=True)
    elif limit < 0 or (limit == 0 and body["logprobs"] is None):
        raise InvalidRequestError("max_tokens is too small.", param="max_tokens")
    params.update(stream=stream, stop_event=stop_event)
    logprob_proc = params.pop("logprob_proc", None)
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    if stream and len(prompts) > 1:
        raise InvalidRequestError("One prompt a stream.", param="prompt")
    choices, asked, written = [], 0, 0
    for prompt in prompts:
        ids = encode(prompt)
        asked += len(ids[0])
        entries = _prompt_logprobs(ids, body["logprobs"]) if body["echo"] and body["logprobs"] is not None else []
        prefix, answer = prompt if body["echo"] else "", ""
        if stream:
            yield _piece("text_completion", text=prefix, logprobs=_completion_logprobs(entries))
        for reply in generate_reply(prompt, params, is_chat=False) if limit != 0 else ():
            if stream and len(reply) > len(answer) and chr(0xFFFD) not in reply[len(answer) :]:
                yield _piece("text_completion", text=reply[len(answer) :])
                answer = reply
            elif not stream:
                answer = reply
        new = len(encode(answer)[0]) if answer else 0
        written += new
        reason, suffix = _reason(len(ids[0]), new, params), body["suffix"] or ""
        if not stream:
            logprobs = _completion_logprobs([*entries, *_written(logprob_proc)])
            text = prefix + answer + suffix
            choices.append({"index": len(choices), "finish_reason": reason, "text": text, "logprobs": logprobs})
        else:
            yield _piece("text_completion", finish_reason=reason, text=suffix)
    if not stream:
        yield _response("text_completion", choices, asked, written)


def _piece(kind, **choice):
    return _response(kind, {"index": 0, "finish_reason": None, "logprobs": None, **choice}, done=False)


def convert_history(messages):
    """(the last question, the system message, the turns before)."""
    system, rows, question = "", [], ""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system":
            system = content
        elif role == "user":
            if question:
                rows.append([question, ""])
            question = content
        else:
            rows.append([question, content])
            question = ""
    return question, system, {"internal": rows, "visible": [list(row) for row in rows], "metadata": {}}


def chat_completions_common(body, stream=False, stop_event=None, prompt_only=False):
    if any("role" not in message or message.get("content") is None for message in body["messages"]):
        raise InvalidRequestError("A message needs a role and content.", param="messages")
    params = process_parameters(body)
    question, system, history = convert_history(body["messages"])
    template = body["instruction_template_str"] or shared.settings["instruction_template_str"]
    params.update(
        instruction_template_str=template, custom_system_message=system, history=history, stream=stream, stop_event=stop_event
    )
    if params["max_new_tokens"] is None:
        params.update(max_new_tokens=512, auto_max_new_tokens=True)
    elif params["max_new_tokens"] <= 0:
        raise InvalidRequestError("max_tokens is too small.", param="max_tokens")
    logprob_proc, going_on = params.pop("logprob_proc", None), body["continue_"]
    if prompt_only:
        yield {"prompt": generate_chat_prompt(question, params, _continue=going_on)}
        return
    if stream:
        yield _piece("chat.completion.chunk", delta={"role": "assistant", "content": ""})
    answer = ""
    for rows in generate_chat_reply(question, params, _continue=going_on, loading_message=False):
        reply = rows["internal"][-1][1]
        if stream and len(reply) > len(answer) and chr(0xFFFD) not in reply[len(answer) :]:
            yield _piece("chat.completion.chunk", delta={"content": reply[len(answer) :]})
            answer = reply
        elif not stream:
            answer = reply
    asked, new = getattr(shared.model, "last_prompt_token_count", 0), len(encode(answer)[0])
    reason = _reason(asked, new, params)
    if stream:
        yield _piece("chat.completion.chunk", delta={}, finish_reason=reason)
        return
    message = {"role": "assistant", "content": answer}
    logprobs = _chat_logprobs(_written(logprob_proc))
    choice = {"index": 0, "finish_reason": reason, "message": message, "logprobs": logprobs}
    yield _response("chat.completion", choice, asked, new)


def completions(body, stop_event=None):
    return deque(completions_common(body, stop_event=stop_event), maxlen=1).pop()


def chat_completions(body, stop_event=None):
    return deque(chat_completions_common(body, stop_event=stop_event), maxlen=1).pop()
