"""Server-sent events, in the shape of the package that the webui takes for them."""

from fastapi.responses import StreamingResponse


class EventSourceResponse(StreamingResponse):
    """Of an iterator of ``{"data": text}``. An error in it breaks the stream off: nothing can be said after the headers."""

    def __init__(self, content, sep="\r\n", **kwargs):
        async def lines():
            async for event in content:
                yield f"data: {event['data']}{sep}{sep}"

        super().__init__(lines(), media_type="text/event-stream", **kwargs)
