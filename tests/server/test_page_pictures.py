"""What is seen of the engine: speeds out of times, cells out of sequences, tokens and their rivals."""

from __future__ import annotations

import json
import re
from html import unescape
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from transformers_llamacpp.reuse import Reuse
from transformers_llamacpp.server.page.cells import Cells, Row, look
from transformers_llamacpp.server.page.chat_tab import bubbles, tree_html
from transformers_llamacpp.server.page.conversation import Conversation
from transformers_llamacpp.server.page.pictures import MOST_TOKENS, cells_html, prompt_html, rates, speed_svg, tokens_html
from transformers_llamacpp.server.page.texts import error_html, note_html, prompt_of, status_html, tiles_of
from transformers_llamacpp.server.page.trace import Token, Trace
from transformers_llamacpp.server.page.writing import Progress

pytestmark = pytest.mark.once

STATS = SimpleNamespace(
    prompt_tokens=100, reused_tokens=80, evaluated_tokens=140, new_tokens=40, decode_calls=20, drafted_tokens=30,
    accepted_tokens=24, prompt_seconds=0.5, generate_seconds=2.0, reuse=Reuse("memory", "80 of 100 were there"),
)  # fmt: skip


def test_rates_add_up() -> None:
    times = [100 + 0.1 * at for at in range(101)]  # ten a second
    found = rates(times)
    assert found[-1][0] == pytest.approx(10) and all(rate == pytest.approx(10, abs=1) for _, rate in found)
    slower = rates([0.1 * at for at in range(50)] + [5 + at for at in range(1, 11)])
    assert slower[0][1] == pytest.approx(10, abs=2) and slower[-1][1] == pytest.approx(1, abs=0.2)
    for times in ([0, 0, 0, 1, 1, 1.5, 3], [5, 5.001], [0.3 * at * at for at in range(300)]):
        found = rates(times)
        width = (times[-1] - times[0]) / len(found)
        assert sum(rate * width for _, rate in found) == pytest.approx(len(times) - 1), "every token counts once"
        assert len(found) <= 60
    assert rates([]) == rates([1]) == rates([1, 1]) == []


def test_the_plot() -> None:
    svg = speed_svg([0.1 * at for at in range(30)])
    assert "10.0 on average" in svg and svg.count("<polyline") == 1
    numbers = [float(x) for x in re.findall(r"[\d.]+(?=,)", re.search(r'curve" points="(.*?)"', svg)[1])]  # type: ignore[index]
    assert numbers == sorted(numbers) and min(numbers) == 44 and max(numbers) <= 632
    assert "<svg" not in speed_svg([1])


def test_cells() -> None:
    shown = cells_html(Cells(150, 4096, 30, 5 << 20, (Row(100, 0, "active"), Row(90, 40, "idle"), Row(10, 0, "host"))))
    assert "150 of 4,096 cells" in shown and "30 texts known" in shown and "and 27 more" in shown and "5 MiB" in shown
    assert shown.count('class="sequence ') == 3 and "40 of them shared" in shown
    assert "No model" in cells_html(None)


def test_the_cells_of_a_model(smollm2_f32: Any) -> None:
    tokenizer = smollm2_f32.tokenizer
    for text in ("One two three four five six", "One two three four five seven eight"):
        smollm2_f32.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=2, do_sample=False)
    cells = look(smollm2_f32.engine)
    assert cells is not None and [row.state for row in cells.rows] == ["idle", "idle"] and cells.texts == 2
    assert cells.rows[0].shared == 0 and cells.rows[1].shared == 5
    assert cells.used == sum(row.length - row.shared for row in cells.rows)
    with smollm2_f32.engine.lock:
        import threading

        found: list[Any] = [0]
        other = threading.Thread(target=lambda: found.append(look(smollm2_f32.engine)))
        other.start()
        other.join(10)
    assert found == [0, None], "nobody waits for a picture"


def test_prompts_and_numbers() -> None:
    progress = Progress(text="x", new_tokens=40, finish="end", stats=STATS)
    assert prompt_of(progress) == (80, 20, "80 of 100 were there")
    assert "width:80.0%" in prompt_html(*prompt_of(progress))
    tiles = {name: (value, more) for value, name, more in tiles_of(progress)}
    assert tiles["tokens/s"][0] == "20.0" and tiles["of drafts accepted"] == ("80 %", "24 of 30")
    assert tiles["decodes"][1].startswith("2.00 tokens each")
    assert tiles_of(Progress(new_tokens=10, seconds=2))[0][0] == "5.0"


def test_lines() -> None:
    assert "40 tokens" in status_html(Progress(finish="end", stats=STATS))
    assert "80 reused, 20 evaluated in 0.50 s" in status_html(Progress(finish="end", stats=STATS))
    assert "24 of 30 drafted accepted" in status_html(Progress(finish="end", stats=STATS))
    assert "Reading the prompt: 5 of 2,000 tokens" in status_html(Progress(evaluated=5, total=2000))
    assert "5 of 9 prompt tokens evaluated" in status_html(Progress(evaluated=5, total=9, finish="stopped"))
    assert "leading beam" in status_html(Progress(new_tokens=5, seconds=1, leading=True))
    assert "<b>" not in error_html("<b>") and "alert" in error_html(ValueError("x")) and "<b>" not in note_html("<b>")


def rivals(html: str) -> list[list[Any]]:
    return [json.loads(unescape(data)) for data in re.findall(r'data-rivals="(.*?)"', html)]


def piece(token: int) -> bytes:
    return [b"zero", b" one", b"\n", b"<b>", b"\xe2\x82", b" five"][token]


def logits(*values: float) -> torch.Tensor:
    return torch.tensor([[*values]]).log()


def test_a_trace_keeps_rivals() -> None:
    trace = Trace(2, piece)
    ids = torch.zeros(1, 7, dtype=torch.int64)
    trace.observe(ids, logits(0.5, 0.3, 0.1, 0.05, 0.04, 0.01))
    trace.put(7, 3)
    token = trace.tokens[0]
    assert token.text == "<b>" and token.probability == pytest.approx(0.05) and not token.changed
    assert [(one.text, one.chosen) for one in token.alternatives] == [("zero", False), (" one", False), ("<b>", True)]
    trace.put(8, 1)
    assert trace.tokens[1].alternatives == () and len(trace.times) == 2, "what was not observed is not known"


def test_what_a_draft_tried_is_not_kept() -> None:
    trace = Trace(1, piece)
    for length, best in ((7, 0), (8, 1), (8, 5)):  # the place after 8 is tried twice
        row = [0.01] * 6
        row[best] = 0.9
        trace.observe(torch.zeros(1, length, dtype=torch.int64), logits(*row))
    trace.put(7, 0)
    trace.put(8, 5)
    assert [token.alternatives[0].text for token in trace.tokens] == ["zero", " five"]
    assert not trace._plain


def test_guidance_shows_both_sides() -> None:
    trace = Trace(2, piece)
    ids = torch.zeros(1, 7, dtype=torch.int64)
    trace.observe(ids, logits(0.5, 0.3, 0.1, 0.05, 0.04, 0.01))
    trace.observe_guided(ids, logits(0.1, 0.6, 0.2, 0.05, 0.04, 0.01))
    trace.put(7, 1)
    token = trace.tokens[0]
    assert token.changed and token.probability == pytest.approx(0.3) and token.guided == pytest.approx(0.6)
    assert [one.text for one in token.alternatives] == [" one", "\n", "zero"], "what was likely without guidance is there too"
    html = tokens_html(trace.tokens)
    assert "at <b>1</b> of 1 places" in html and 'class="token p6 changed"' in html
    assert rivals(html) == [[[" one", 0.3, 0.6, True], ["⏎", 0.1, 0.2, False], ["zero", 0.5, 0.1, False]]]


def test_tokens_are_text_and_never_markup() -> None:
    trace = Trace(3, piece)
    trace.observe(torch.zeros(1, 1, dtype=torch.int64), logits(0.1, 0.1, 0.1, 0.5, 0.1, 0.1))
    trace.put(1, 3)
    html = tokens_html(trace.tokens)
    assert "<b>" not in html.replace("<b>0</b>", "") and rivals(html)[0][0][:2] == ["<b>", 0.5]
    assert 'tabindex="0"' in html and "arrow keys" in html


def test_long_texts_show_their_end() -> None:
    tokens = [Token(str(at), 0.5) for at in range(MOST_TOKENS + 5)]
    html = tokens_html(tokens)
    assert html.count("<button") == MOST_TOKENS and ">1004<" in html and ">4<" not in html and "of 1,005 tokens" in html
    assert "Write something first" in tokens_html([]) and "No alternatives were kept" in tokens_html([Token("x")])


def test_conversations_for_the_browser() -> None:
    conversation = Conversation()
    conversation.add("user", "\tx")
    conversation.edit(0, "y")
    assert bubbles(conversation)[0]["content"] == [{"type": "text", "text": "y"}]
    assert 'data-versions="[[2, 2]]" data-after="0"' in tree_html(conversation)
