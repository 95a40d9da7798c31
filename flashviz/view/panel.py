"""What stands beside the picture, as HTML: code with its actions marked, the numbers in the slots, the legend.

Everything that comes from a recording is escaped. The only scripts are fixed strings of this module that carry
numbers: a line of code that is clicked goes to the next step that performs it, and a marked line scrolls into view.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from operator import index

from flashviz.checks.traffic import Running
from flashviz.events import Source, Step
from flashviz.recording import Recording
from flashviz.view.draw import HEIGHT, WIDTH
from flashviz.view.facts import hues_of, layout_for, levels_of, own_hues
from flashviz.view.numbers import rows_of
from flashviz.view.palette import GROUND, HATCH, HUES, OUTLINE, STALE, Hue, fill_of
from flashviz.view.svg import css_id
from flashviz.view.timeline import Strip

MOST_TARGETS = 2000
_GO = (
    "const r=this.closest('.fv-player'),b=r&&r.querySelector('.fv-box input');if(b){{const t=[{targets}],c=+b.value;"
    "b.value=t.find(x=>x>c)??t[0];b.dispatchEvent(new Event('change',{{bubbles:true}}))}}"
)
_KEY = "if(event.key==='Enter'||event.key===' '){event.preventDefault();this.click()}"
_SEE = "const p=this.closest('.fv-code');p.scrollTop=this.offsetTop-p.clientHeight/4"
_NAME = (
    "const r=this.closest('.fv-player'),n=(s,...t)=>r.querySelectorAll(s).forEach((e,k)=>{"
    "e.setAttribute('aria-label',t[k%t.length]);e.setAttribute('data-lm-suppress-shortcuts','true')});"
    "n('.noUi-handle','Step');n('.fv-list select','Steps');n('.fv-speed select','Speed');"
    "r.querySelectorAll('.fv-play button').forEach((e,k)=>e.setAttribute('aria-label',['Play or pause','Stop'][k]||''))"
)
NAMES = f'<span class="fv-named" onanimationstart="{_NAME}"></span>'
"""Once in a player: names the controls that ipywidgets leaves unnamed, and keeps Jupyter's one-key commands (``b`` inserts
a cell, arrows leave it) away from its slider and its lists."""

STYLE = """
@keyframes fv-named{from{opacity:.99}}.fv-named{animation:fv-named 1ms}
.fv-player{--fv-beside:clamp(220px,calc(78vh - 300px),420px)}
.fv-player .fv-left{flex:1 1 400px;max-width:min(600px,64vh)}
.fv-player .widget-html-content{width:100%;min-width:0}
.fv-player .fv-pic{aspect-ratio:RATIO}.fv-player .fv-pic svg{display:block}
.fv-player .fv-code{position:relative;height:var(--fv-beside);box-sizing:border-box;overflow:auto;margin:4px 0 0;
 padding:8px 0;background:#fafafa;color:#27272a;border:1px solid #d4d4d8;border-radius:6px;white-space:pre;
 font:12px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.fv-player .fv-code code{display:block;width:max-content;min-width:100%;background:none;color:inherit;font:inherit;
 padding:0}
.fv-l{display:block;white-space:pre;padding:0 10px 0 0}
.fv-l::before{content:attr(data-n);display:inline-block;width:2.6em;margin-right:1em;text-align:right;color:#63636b}
.fv-a{display:block;cursor:pointer;border-left:3px solid transparent}
.fv-a:where(:hover){background:#f4f4f5}.fv-a:focus-visible{outline:2px solid #2563eb;outline-offset:-2px}
.fv-now{color:var(--jp-ui-font-color1,inherit);font:13px/1.4 system-ui,sans-serif;min-height:1.4em;white-space:pre-line}
.fv-where{height:1.4em;overflow:hidden;white-space:nowrap;text-overflow:ellipsis}
.fv-counts{height:2.8em;overflow:hidden;white-space:pre;font-variant-numeric:tabular-nums}
.fv-player .fv-numbers{height:var(--fv-beside);overflow:auto;margin:4px 0 0;background:#fafafa;color:#27272a;
 border:1px solid #d4d4d8;border-radius:6px;padding:8px;box-sizing:border-box;font:12px/1.35 system-ui,sans-serif}
.fv-player .fv-numbers table{border-collapse:collapse;margin:2px 0 10px;font:12px ui-monospace,Menlo,Consolas,monospace}
.fv-player .fv-numbers tr{background:none}
.fv-player .fv-numbers td{padding:1px 6px;text-align:right;border:1px solid #e4e4e7;background:#fff;color:#27272a}
.fv-player .fv-numbers h4{margin:0;font:600 12px system-ui,sans-serif;color:#27272a}
.fv-legend{display:flex;flex-wrap:wrap;gap:4px 14px;font:12px/1.5 system-ui,sans-serif;padding-top:6px;
 color:var(--jp-ui-font-color1,inherit)}
.fv-chip{display:inline-block;width:1.6em;height:.9em;vertical-align:-.1em;margin-right:.4em;border:1.5px solid}
.fv-time{position:relative;overflow:hidden;border-radius:6px}.fv-time img{display:block;width:100%}
.fv-time-mark{position:absolute;box-sizing:content-box;margin:-3px;padding:2px;border:2px solid #18181b;
 background:rgba(250,204,21,.75);min-width:3px;min-height:3px}
""".replace("RATIO", f"{WIDTH:g}/{HEIGHT:g}")
"""Styles of the panels: their own light ground, so that they read the same in a dark theme, and heights that no step
changes. The picture's width is limited so that it fits below the controls on a laptop's screen."""


def part_of(recording: Recording, steps: range | slice | Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of the steps to play: everything when not given; negative numbers count from the end.

    Raises:
        ValueError: no steps; IndexError: there is no such step; TypeError: not a range, a slice or numbers.
    """
    everything = tuple(range(len(recording.steps)))
    if not everything:
        raise ValueError("this recording has no steps")
    if steps is None:
        return everything
    try:
        chosen = everything[steps] if isinstance(steps, slice) else tuple(index(s) for s in steps)
    except TypeError:
        raise TypeError(
            f"steps={steps!r}: give a range, a slice or step numbers, such as range(0, {len(everything)})"
        ) from None
    if not chosen:
        raise ValueError(f"steps={steps!r} names none of the {len(everything)} steps (0 to {len(everything) - 1})")
    for number in chosen:
        recording.check_step(number)
    return tuple(s % len(everything) for s in chosen)


def options_of(recording: Recording, numbers: Sequence[int]) -> list[str]:
    """The step list: position and label; in a part also the step's own number, where it is another."""
    own = [f" (step {n})" if n != position else "" for position, n in enumerate(numbers)]
    labels = [recording.steps[n].label for n in numbers]
    return [f"{position} · {label}{number}" for position, (label, number) in enumerate(zip(labels, own, strict=True))]


@lru_cache(maxsize=32)
def _highlighted(language: str, text: str) -> tuple[str, ...]:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        lexer = get_lexer_by_name("text", stripnl=False)
    formatter = HtmlFormatter(nowrap=True, noclasses=True, style="xcode")
    lines = highlight(text, lexer, formatter).split("\n")
    return tuple(lines[: text.count("\n") + 1])


def action_class(name: str) -> str:
    """The class of an action's lines."""
    return f"fv-a-{css_id(name)}"


def targets_of(recording: Recording, numbers: Sequence[int]) -> dict[str, list[int]]:
    """For each action, the positions (in the part that is played) of the steps that perform it."""
    out: dict[str, list[int]] = {}
    for position, number in enumerate(numbers):
        for name in recording.steps[number].actions:
            out.setdefault(name, []).append(position)
    return out


def code_html(source: Source, targets: Mapping[str, Sequence[int]]) -> str:
    """Source text with line numbers; each action's lines can be clicked, and are marked by :func:`mark_css`."""
    lines = _highlighted(source.language, source.text)
    owner: dict[int, tuple[str, int]] = {a: (name, b) for name, a, b in source.lines}
    out, n = [], 1
    while n <= len(lines):
        if n in owner:
            name, last = owner[n]
            steps = targets.get(name, ())
            go = _GO.format(targets=",".join(str(int(t)) for t in steps[:MOST_TARGETS]))
            click = f' role="button" tabindex="0" onclick="{go}" onkeydown="{_KEY}"' if steps else ""
            title = escape(f"{name}: go to its next step" if steps else f"{name}: not performed here", quote=True)
            click = f'{click} aria-label="{title} (line {n})"' if steps else ""
            body = "".join(_line(k, lines[k - 1]) for k in range(n, min(last, len(lines)) + 1))
            out.append(
                f'<span class="fv-a {action_class(name)}" title="{title}"{click} onanimationstart="{_SEE}">{body}</span>'
            )
            n = last + 1
        else:
            out.append(_line(n, lines[n - 1]))
            n += 1
    name = escape(source.name, quote=True)
    return f'<pre class="fv-code" tabindex="0" role="region" aria-label="source of {name}"><code>{"".join(out)}</code></pre>'


def _line(number: int, html: str) -> str:
    return f'<span class="fv-l" data-n="{number}">{html or " "}</span>'


def mark_css(scope: str, step: Step) -> str:
    """The rule that marks the lines of a step's actions inside the element of class ``scope``."""
    if not step.actions:
        return ""
    marked = ",".join(f".{scope} .{action_class(a)}" for a in step.actions)
    first = f".{scope} .{action_class(step.actions[0])}"
    name = f"{scope}-{step.first}"
    return (
        f"{marked}{{background:#fef9c3;border-left-color:#ca8a04}}"
        f"@keyframes {name}{{from{{opacity:.99}}}}{first}{{animation:{name} 1ms}}"
    )


def where_text(step: Step) -> str:
    """The loop variables of a step and its actions: ``"i = 0, j = 1 · softmax, accumulate"``."""
    tiles = ", ".join(f"{name} = {value}" for name, value in step.tiles)
    return " · ".join(x for x in (tiles, ", ".join(step.actions)) if x) or step.label


def counts_text(now: Running) -> str:
    """What has crossed HBM so far, in words: a line for each direction."""
    fetches, stores = "fetch" if now.fetches == 1 else "fetches", "store" if now.stores == 1 else "stores"
    return (
        f"{now.fetches} {fetches} from HBM, {now.bytes_read:,} bytes\n"
        f"{now.stores} {stores} to HBM, {now.bytes_written:,} bytes"
    )


def numbers_html(recording: Recording, number: int) -> str:
    """The numbers in every on-chip slot at the end of a step, and in what the step wrote to HBM."""
    step = recording.steps[number]
    if step.block is None:
        return '<div class="fv-numbers">No block runs yet.</div>'
    drawn = layout_for(recording, step.block, step.launch).boxes  # slots of another launch are left out
    own = [s for s in recording.slots if not s.shared_by_grid]
    shown = [s for s in own if s.name in drawn or recording.content(number, s.name) is not None]
    shown += [s for s in recording.slots if s.shared_by_grid and recording.touched(s.name, step.first, step.end)]
    parts = []
    for slot in shown:
        content = recording.content(number, slot.name)
        label = f" = {content.label}" if content and content.label and content.label != slot.name else ""
        head = escape(f"{slot.name}{label}") + (" (stale)" if content and content.stale else "")
        if content is None:
            parts.append(f"<h4>{head}</h4><div>empty</div>")
        elif content.values is None:
            parts.append(f"<h4>{head}</h4><div>too large to travel along: {content.shape} elements</div>")
        else:
            rows = "".join(
                "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows_of(content.values.array)
            )
            parts.append(f"<h4>{head}</h4><table>{rows}</table>")
    return (
        f'<div class="fv-numbers" tabindex="0" role="region" aria-label="numbers in the slots">{"".join(parts)}</div>'
    )


def timeline_html(strip: Strip) -> str:
    """The timeline with a box that :func:`timeline_css` puts on the current step."""
    data = base64.b64encode(strip.png).decode()
    return (
        '<div class="fv-time"><img alt="timeline: multiprocessors down, time across" '
        f'src="data:image/png;base64,{data}"><span class="fv-time-mark"></span></div>'
    )


def timeline_css(scope: str, strip: Strip, number: int) -> str:
    """Where the mark is for a step, inside the element of class ``scope``; nowhere for a step without actions."""
    place = strip.places.get(number)
    if place is None:
        return f".{scope} .fv-time-mark{{display:none}}"
    left, top, width, height = (f"{100 * part:.3f}%" for part in place)
    return f".{scope} .fv-time-mark{{left:{left};top:{top};width:{width};height:{height}}}"


def legend_html(recording: Recording) -> str:
    """The hues of what is drawn, named."""
    drawn = {name for n in range(max(len(recording.launches), 1)) for name in layout_for(recording, None, n).boxes}
    levels, hues, own = levels_of(recording), hues_of(recording), own_hues(recording)
    chips, seen = [], set[tuple[str, str]]()
    order = list(HUES.values())
    each = {s.name: own.get(s.name) or hues[s.tensor] for s in recording.slots}
    for slot in sorted(recording.slots, key=lambda s: _rank(each[s.name], order)):
        hue = each[slot.name]
        said = (hue.meaning or slot.tensor, hue.outline)
        if slot.name not in drawn or said in seen:
            continue
        seen.add(said)
        most = levels.get(slot.tensor, 1)
        first, last = fill_of(hue, 1, most), fill_of(hue, max(most, 1) if not hue.alternates else 2, most)
        ground = first if first == last else f"linear-gradient(90deg,{first} 50%,{last} 50%)"
        chips.append(_chip(ground, hue.outline, hue.meaning or slot.tensor))
    if any(getattr(e, "role", "") == "stale" for e in recording.events):
        chips.append(_chip(STALE, OUTLINE, "stale: computed from an earlier tile"))
    if any(getattr(e, "asynchronous", False) for e in recording.events):
        stripes = f"repeating-linear-gradient(45deg,{GROUND} 0 3px,{HATCH} 3px 4px)"
        chips.append(_chip(stripes, OUTLINE, "on its way: asked for, not waited for yet"))
    return f'<div class="fv-legend" role="note" aria-label="legend">{"".join(chips)}</div>'


def _rank(hue: Hue, order: list[Hue]) -> int:
    return order.index(hue) if hue in order else len(order)


def _chip(ground: str, edge: str, text: str) -> str:
    return f'<span><span class="fv-chip" style="background:{ground};border-color:{edge}"></span>{escape(text)}</span>'
