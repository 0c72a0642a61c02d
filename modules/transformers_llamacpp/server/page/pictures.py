"""Pictures of what the engine does, as SVG and HTML in the page's own colours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from .cells import Cells, Row
from .trace import Alternative, Token

__all__ = ["cells_html", "prompt_html", "rates", "speed_svg", "tiles_html", "tokens_html"]

MOST_TOKENS = 1000
POINTS = 60


def rates(times: Sequence[float], points: int = POINTS) -> list[tuple[float, float]]:
    """`(seconds since the first token, tokens per second)`, the mean of one part in `points` of the time, or of a second where
    that is more, but for short texts. `times` are those of the tokens."""
    if len(times) < 2 or times[-1] <= times[0]:
        return []
    span = times[-1] - times[0]
    parts = max(1, round(span / max(span / points, min(1.0, span / 8))))
    found, at = [], 1
    for number in range(1, parts + 1):
        end, before = times[0] + span * number / parts, at
        while at < len(times) and (times[at] <= end or number == parts):
            at += 1
        found.append((span * number / parts, (at - before) * parts / span))
    return found


def speed_svg(times: Sequence[float]) -> str:
    """Tokens per second over the time of a text."""
    series = rates(times)
    if not series:
        return _empty("The speed of the text, token by token, is drawn here while it is written.")
    width, height, left, bottom = 640, 180, 44, 24
    last, top = series[-1][0], _round_up(max(rate for _, rate in series))
    points = [(0.0, series[0][1]), *series]

    def at(seconds: float, rate: float) -> tuple[float, float]:
        x = left + (width - left - 8) * seconds / last
        return x, 8 + (height - bottom - 8) * (1 - rate / top)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    (x0, _), (x1, _) = at(0, 0), at(last, 0)
    base = height - bottom
    marks = "".join(
        f'<line class="grid" x1="{left}" x2="{width - 8}" y1="{at(0, value)[1]:.1f}" y2="{at(0, value)[1]:.1f}"/>'
        f'<text x="{left - 6}" y="{at(0, value)[1] + 4:.1f}" text-anchor="end">{value:g}</text>'
        for value in (0, top / 2, top)
    )
    mean = (len(times) - 1) / last
    label = f"Tokens per second over {last:.1f} seconds, {mean:.1f} on average, {max(rate for _, rate in series):.1f} at most"
    return (
        f'<svg class="plot" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{marks}'
        f'<polygon class="area" points="{x0:.1f},{base} {line} {x1:.1f},{base}"/><polyline class="curve" points="{line}"/>'
        f'<text x="{left}" y="{height - 6}">0 s</text>'
        f'<text x="{width - 8}" y="{height - 6}" text-anchor="end">{last:.1f} s</text>'
        "</svg>"
    )


def _round_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, …"""
    step = 1.0
    while True:
        for factor in (1, 2, 5):
            if value <= step * factor:
                return step * factor
        step *= 10


def tiles_html(tiles: Sequence[tuple[str, str, str]]) -> str:
    """`(value, what it is, more about it)`"""
    found = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span><small>{escape(more)}</small></div>'
        for value, name, more in tiles
    )
    return f'<div class="tiles">{found}</div>'


def prompt_html(reused: int, evaluated: int, reason: str) -> str:
    """How much of a prompt was in memory."""
    total = reused + evaluated
    if not total:
        return _empty("How much of the prompt was still in memory shows here after the first answer.")
    share = 100 * reused / total
    return (
        f'<div class="bar" role="img" aria-label="{reused} of {total} prompt tokens reused"><i class="reused" '
        f'style="width:{share:.1f}%"></i><i class="evaluated" style="width:{100 - share:.1f}%"></i></div>'
        f'<div class="legend"><span class="reused">{reused:,} reused</span>'
        f'<span class="evaluated">{evaluated:,} evaluated</span></div>'
        f"<p>{escape(reason)}</p>"
    )


STATES = {"active": "being written", "idle": "kept for reuse", "host": "saved outside the buffer"}


def cells_html(cells: Cells | None) -> str:
    """Each sequence as a bar, on the scale of what one may hold; the lighter part is shared with one above."""
    if cells is None:
        return _empty("No model is loaded.")
    share = 100 * cells.used / max(1, cells.n_cells)
    head = (
        f'<div class="bar" role="img" aria-label="{cells.used} of {cells.n_cells} cells used"><i class="reused" '
        f'style="width:{share:.1f}%"></i></div><p>{cells.used:,} of {cells.n_cells:,} cells, {cells.texts:,} '
        f"text{'s' * (cells.texts != 1)} known, {cells.host_bytes / 2**20:,.0f} MiB of states in host memory</p>"
    )
    longest = max((row.length for row in cells.rows), default=1)
    scale = 85 / max(longest, 1)  # per cent; the rest is for the numbers
    rows = "".join(_sequence(row, scale) for row in cells.rows)
    more = cells.texts - len(cells.rows)
    states = "".join(f'<span class="{state}">{text}</span>' for state, text in STATES.items())
    tail = f"<p>and {more:,} more</p>" if more > 0 else ""
    legend = f'<div class="legend">{states}<span class="shared">shared</span></div>'
    return f'{head}<div class="sequences">{rows}</div>{tail}{legend}'


def _sequence(row: Row, scale: float) -> str:
    about = f"{row.length:,} tokens, {STATES[row.state]}" + (f", {row.shared:,} of them shared" if row.shared else "")
    return (
        f'<div class="sequence {row.state}" title="{about}"><i class="shared" style="width:{row.shared * scale:.1f}%"></i>'
        f'<i class="own" style="width:{(row.length - row.shared) * scale:.1f}%"></i><span>{row.length:,}</span></div>'
    )


def tokens_html(tokens: Sequence[Token]) -> str:
    """The text, each token a button that shows what else could have stood there. `page.js` shows it: from `data-rivals`, a
    list of `[text, probability, probability with guidance or null, chosen]`."""
    if not tokens:
        return _empty("Write something first: each token of the newest text can then be looked at here.")
    shown = tokens[-MOST_TOKENS:]
    known = any(token.probability is not None for token in shown)
    guided = any(token.guided is not None for token in shown)
    lines = []
    if guided:
        changed = sum(token.changed for token in tokens)
        lines.append(
            f"<p>Guidance changed the likeliest token at <b>{changed:,}</b> of {len(tokens):,} places (underlined). "
            "Choose a token to see the probabilities without and with it.</p>"
        )
    elif known:
        lines.append("<p>The darker, the less likely. Choose a token, or walk with the arrow keys, to see its rivals.</p>")
    else:
        lines.append("<p>No alternatives were kept: see “Alternatives kept” in the parameters.</p>")
    buttons = "".join(_button(number, token) for number, token in enumerate(shown))
    if len(tokens) > len(shown):
        lines.append(f"<p>The last {len(shown):,} of {len(tokens):,} tokens.</p>")
    return (
        f'{"".join(lines)}<div class="token-view"><div class="tokens" role="listbox" aria-label="Tokens of the newest text">'
        f'{buttons}</div><div class="rivals" aria-live="polite"></div></div>'
    )


def _button(number: int, token: Token) -> str:
    value = token.probability if token.guided is None else token.guided
    level = "" if value is None else f" p{min(9, int(value * 10 + 1e-4))}"
    data = escape(json.dumps([_rival(one) for one in token.alternatives], ensure_ascii=False, separators=(",", ":")))
    about = "" if value is None else f' title="{100 * value:.1f} %"'
    line = "<br>" * token.text.count("\n")
    return (
        f'<button type="button" role="option" aria-selected="false" class="token{level}{" changed" * token.changed}" '
        f'tabindex="{0 if number == 0 else -1}" data-rivals="{data}"{about}>{escape(visible(token.text))}</button>{line}'
    )


def _rival(one: Alternative) -> list[Any]:
    guided = None if one.guided is None else round(one.guided, 5)
    return [visible(one.text), round(one.probability, 5), guided, one.chosen]


def visible(text: str) -> str:
    """What has no shape of its own gets one."""
    return text.replace("\n", "⏎").replace("\t", "⇥") or "∅"


def _empty(text: str) -> str:
    return f'<p class="nothing">{escape(text)}</p>'
