"""What a reader sees of a player in a browser, read in one go: the same questions for the widgets and for the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import expect

import flashviz as fv
from flashviz.view import panel
from flashviz.view.svg import css_id

# Everything that shows a position or belongs to one, of the player whose root is `r`.
SEEN = """r => {
    const $ = s => r.querySelector(s), text = s => $(s).textContent.trim().replace(/\\s+/g, ' ');
    const pic = $('.fv-pic'), list = $('.fv-list select, select.fv-steps');
    const marked = [...r.querySelectorAll('.fv-a')].filter(e => getComputedStyle(e).backgroundColor === 'rgb(254, 249, 195)');
    return {
        index: +pic.dataset.index, caption: pic.querySelector('svg > title').textContent,
        slider: +($('.noUi-handle')?.getAttribute('aria-valuenow') ?? $('input[type=range]').value),
        box: +$('.fv-box input').value, list: list.selectedIndex,
        where: text('.fv-where'), counts: text('.fv-counts'),
        marked: [...new Set(marked.map(e => e.classList[1]))].sort(),
    };
}"""
LIST_SHOWS_SELECTED = """r => {
    const list = r.querySelector('.fv-list select, select.fv-steps'), a = list.getBoundingClientRect();
    const b = list.options[list.selectedIndex].getBoundingClientRect();
    return b.top >= a.top - 1 && b.bottom <= a.bottom + 1 && a.height > 100;
}"""
CODE_SHOWS_MARKED = """r => {
    const code = r.querySelector('.fv-code').getBoundingClientRect();
    const lines = [...r.querySelectorAll('.fv-a')].filter(e => getComputedStyle(e).backgroundColor === 'rgb(254, 249, 195)');
    const top = Math.min(...lines.map(e => e.getBoundingClientRect().top));
    return lines.length > 0 && top >= code.top - 1 && top < code.bottom - 20;
}"""
# Texts that we bring and that stand on too little contrast; colours are composed from the ground up.
LOW_CONTRAST = """r => {
    const parse = c => { const m = c.match(/[\\d.]+/g).map(Number); return [m[0], m[1], m[2], m.length > 3 ? m[3] : 1]; };
    const lum = c => { const [x, y, z] = c.slice(0, 3).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
        return .2126 * x + .7152 * y + .0722 * z; };
    const over = (a, b) => [0, 1, 2].map(k => a[k] * a[3] + b[k] * (1 - a[3])).concat(1);
    const canvas = getComputedStyle(document.documentElement).colorScheme.includes('dark')
        && matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
    const ground = e => { const stack = []; for (; e; e = e.parentElement) stack.push(parse(getComputedStyle(e).backgroundColor));
        return stack.reverse().reduce((b, a) => over(a, b), canvas); };
    const low = [], seen = new Set(), walker = document.createTreeWalker(r, NodeFilter.SHOW_TEXT);
    let count = 0;
    const check = (e, pseudo) => {
        const style = getComputedStyle(e, pseudo), back = ground(e), front = over(parse(style.color), back);
        const [hi, lo] = [lum(front), lum(back)].sort((a, b) => b - a), ratio = (hi + .05) / (lo + .05);
        count++;
        if (ratio < 4.5) low.push([e.className || e.tagName, e.textContent.slice(0, 20), style.color, back.slice(0, 3).join(), +ratio.toFixed(2)]);
    };
    for (let n; n = walker.nextNode();) {
        const e = n.parentElement;
        if (!n.textContent.trim() || e.closest('svg, style, script, .jp-mod-hidden') || seen.has(e) || !e.getClientRects().length) continue;
        seen.add(e); check(e);
        if (e.closest('.fv-l')) check(e.closest('.fv-l'), '::before');
    }
    return {count, low};
}"""


@dataclass
class Watched:
    """A player on a page and what it must show."""

    page: Any
    root: Any
    run: Any
    numbers: tuple[int, ...]

    def __post_init__(self) -> None:
        recording = self.run.recording
        self.expected = []
        for position, number in enumerate(self.numbers):
            step, counted = recording.steps[number], fv.traffic(recording, upto_step=number)
            self.expected.append(
                {
                    "index": position,
                    "caption": step.caption,
                    "slider": position,
                    "box": position,
                    "list": position,
                    "where": panel.where_text(step),
                    "counts": f"{counted.fetches} fetch{'' if counted.fetches == 1 else 'es'} from HBM, "
                    f"{counted.bytes_read:,} bytes {counted.stores} store{'' if counted.stores == 1 else 's'} to HBM, "
                    f"{counted.bytes_written:,} bytes",
                    "marked": sorted(panel.action_class(a) for a in step.actions),
                }
            )
        expect(self.picture).to_have_attribute("data-index", "0")

    @property
    def picture(self) -> Any:
        return self.root.locator(".fv-pic")

    def button(self, name: str) -> Any:
        return self.root.get_by_role("button", name=name, exact=True)

    def seen(self) -> dict[str, Any]:
        return dict(self.root.evaluate(SEEN))

    def shows(self, position: int, *, code: bool = True) -> None:
        """Wait until the picture is that of a position; then everything else must be, or become so at once."""
        expect(self.picture).to_have_attribute("data-index", str(position))
        expected = dict(self.expected[position])
        if not code:
            expected["marked"] = []
        handle = self.root.element_handle()
        try:
            self.page.wait_for_function(
                f"([r, e]) => {{ const s = ({SEEN})(r); return JSON.stringify(s) === JSON.stringify(e) }}",
                arg=[handle, expected],
                timeout=5_000,
            )
        except Exception:
            seen = self.seen()
            wrong = {name: (seen[name], value) for name, value in expected.items() if seen[name] != value}
            assert not wrong, f"position {position}: (seen, expected) {wrong}"
        self.root.page.wait_for_function(f"r => ({LIST_SHOWS_SELECTED})(r)", arg=handle, timeout=5_000)
        if expected["marked"]:
            self.root.page.wait_for_function(f"r => ({CODE_SHOWS_MARKED})(r)", arg=handle, timeout=5_000)

    def type_step(self, position: int) -> None:
        box = self.root.locator(".fv-box input")
        box.fill(str(position))
        box.press("Enter")

    def pick(self, position: int) -> None:
        self.root.get_by_role("listbox", name="Steps").select_option(index=position)

    def line(self, action: str) -> Any:
        """The lines of code of an action."""
        return self.root.locator(f".fv-a.{panel.action_class(action)}").first

    def next_of(self, action: str, position: int) -> int:
        """Where a click on the action's lines leads."""
        steps = self.run.recording.steps
        where = [p for p, n in enumerate(self.numbers) if action in steps[n].actions]
        return next((p for p in where if p > position), where[0])

    def height(self) -> float:
        return float(self.root.evaluate("r => r.getBoundingClientRect().height"))

    def low_contrast(self) -> list[Any]:
        found = self.root.evaluate(LOW_CONTRAST)
        assert found["count"] > 20
        return list(found["low"])


def watch(page: Any, root: Any, run: Any, numbers: range | None = None) -> Watched:
    """The player with that root element."""
    return Watched(page, root, run, tuple(numbers or range(len(run.recording.steps))))


def every_control(player: Watched) -> None:
    """Each control once, and after each the same everywhere; the height never changes."""
    player.shows(0)
    height = player.height()
    for name, position in [("Next ›", 1), ("Next ›", 2), ("Next ›", 3), ("‹ Back", 2), ("Last »", 18), ("Next ›", 18)]:
        player.button(name).click()
        player.shows(position)
        assert player.height() == height
    for name, position in [("« First", 0), ("‹ Back", 0)]:
        player.button(name).click()
        player.shows(position)
    for position in (12, 18, 0, 7):
        player.pick(position)
        player.shows(position)
        assert player.height() == height
    for position in (5, 16):
        player.type_step(position)
        player.shows(position)
    player.type_step(99)
    player.shows(18)
    at = 18
    for action in ("scores", "scores", "load_k", "store_o"):
        player.line(action).click()
        at, before = player.next_of(action, at), at
        assert at != before
        player.shows(at)
    for key in ("Enter", "Space"):
        player.line("softmax").focus()
        player.page.keyboard.press(key)
        at = player.next_of("softmax", at)
        player.shows(at)
    for name, source in [("CUDA", "cuda"), ("Python", "python")]:
        player.button(name).click()
        expect(player.root.locator(".fv-code")).to_contain_text("__global__" if source == "cuda" else "def scores")
        player.shows(at)
    player.button("Numbers").click()
    player.shows(at, code=False)
    values = player.run.recording.values(player.numbers[at], "mi").ravel()
    cells = player.root.locator(".fv-numbers h4", has_text="mi").locator("+ table td").all_inner_texts()
    assert [float(cell) for cell in cells] == [round(float(x), 3) for x in values]
    player.page.wait_for_function(
        "([r, h]) => r.getBoundingClientRect().height === h", arg=[player.root.element_handle(), height]
    )
    player.button("Python").click()
    player.shows(at)


# Runs in the page: notes when the slider moves, by itself and whatever draws it.
NOTE_MOVES = """r => {
    const notes = window.notes = [];
    const note = () => {
        const n = r.querySelector('.fv-pic')?.dataset.index;
        if (n !== undefined && notes.at(-1)?.[0] !== n) notes.push([n, performance.now()]);
    };
    new MutationObserver(note).observe(r, {subtree: true, childList: true, attributes: true, attributeFilter: ['data-index']});
}"""


def plays_to_the_end(player: Watched) -> None:
    """D01: Play pressed three times plays at the speed chosen, and the last step is drawn."""
    root = player.root
    root.get_by_role("combobox", name="Speed").select_option("4 ×")
    player.button("« First").click()
    player.shows(0)
    root.evaluate(NOTE_MOVES)
    play = root.locator(".fv-play button, button.fv-play").first
    for _ in range(3):
        play.click()
    last = len(player.numbers) - 1
    expect(player.picture).to_have_attribute("data-index", str(last), timeout=60_000)
    player.shows(last)
    notes = [(int(n), when) for n, when in player.page.evaluate("window.notes")]
    shown = [n for n, _ in notes]
    assert shown == sorted(set(shown)), "no step twice, none backwards"
    assert shown[-1] == last
    (first, start), (_, end) = notes[2], notes[-1]
    step_ms = (900 + 350) / 4
    assert end - start > 0.9 * step_ms * (last - first), "faster than the speed chosen"
    expect(root.locator(".fv-play i.fa-play, button.fv-play[aria-label=Play]")).to_be_visible()
    assert root.evaluate("r => getComputedStyle(r).getPropertyValue('--fv-step').trim()") == "225ms"
    expect(root.get_by_role("combobox", name="Speed").locator("option:checked")).to_have_text("4 ×")


# The boxes of a picture whose tween is held at a moment: t from 0 to 1 of its whole length.
HELD = """([r, t]) => {
    const svg = r.querySelector('.fv-pic svg'), all = svg.getAnimations({subtree: true});
    const whole = Math.max(...all.map(a => a.effect.getComputedTiming().endTime));
    for (const a of all) { a.pause(); a.currentTime = t * whole; }
    const out = {};
    for (const a of all) {
        const e = a.effect.target, b = e.getBoundingClientRect();
        out[e.id.split('-').pop()] = [b.x, b.y, b.width, b.height];
    }
    return {boxes: out, whole};
}"""


def tween_moves(player: Watched) -> None:
    """Q0 starts on Q0 in HBM and lands on Qi; the scores fill one by one."""
    player.pick(1)
    player.shows(1)
    player.button("Next ›").click()
    player.shows(2)
    root = player.root.element_handle()
    held = [player.page.evaluate(HELD, [root, t]) for t in (0, 0.5, 1)]
    assert held[0]["whole"] > 200
    place = (
        "([r, id]) => { const b = r.querySelector(`.fv-pic svg [id$='-${id}']`).getBoundingClientRect();"
        " return [b.x, b.y, b.width, b.height] }"
    )
    source = player.page.evaluate(place, [root, css_id("Q0.fill")])
    target = player.page.evaluate(place, [root, css_id("Qi.box")])
    (x0, y0), (x1, y1), (x2, y2) = (h["boxes"][css_id("Qi.fill")][:2] for h in held)
    assert (x0, y0) == pytest.approx(source[:2], abs=3)
    assert (x2, y2) == pytest.approx(target[:2], abs=3)
    assert y0 + 10 < y1 < y2 - 10
    assert min(x0, x2) - 0.5 <= x1 <= max(x0, x2) + 0.5
    player.pick(3)
    player.shows(3)
    player.button("Next ›").click()
    player.shows(4)
    half = player.page.evaluate(HELD, [root, 0.53])["boxes"]
    heights = [half[css_id(f"Sij.{r}.{c}")][3] for r in range(4) for c in range(4)]
    assert heights == sorted(heights, reverse=True)
    assert heights[7] > 10
    assert heights[-1] < 1
    player.pick(3)
    player.shows(3)
    assert player.root.evaluate("r => r.querySelector('.fv-pic svg').getAnimations({subtree: true}).length") == 0
