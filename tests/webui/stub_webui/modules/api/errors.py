class OpenAIError(Exception):
    def __init__(self, message=None, code=500, internal_message=""):
        super().__init__(message)
        self.message, self.code, self.internal_message = message, code, internal_message


class InvalidRequestError(OpenAIError):
    def __init__(self, message, param, code=400, internal_message=""):
        super().__init__(message, code, internal_message)
        self.param = param
