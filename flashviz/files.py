"""Recordings as files: versioned JSON, written whole or not at all, and read whole or not at all.

Requirements: the only module that imports msgspec; the file's types are derived from the dataclasses of ``slots``,
``events`` and ``recording``, so that nothing is written twice; whatever a file holds, reading it gives a recording
that every other module can trust, or a :class:`RecordingFileError`, and never runs anything.

The published schema is ``docs/recording.schema.json``; ``python -m flashviz.files`` prints it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np

from flashviz import events
from flashviz.events import Barrier, Change, Event, Finding, Launch, Move, Part, Source, Step, Trace
from flashviz.recording import Recording, as_recording, no_collector
from flashviz.slots import BFLOAT16, SCOPES, Slot, Values, itemsize_of, shape_text

FORMAT = "flashviz-recording"
VERSION = 1
"""One more whenever a file written by a newer flashviz could be misread by an older one."""

LONGEST = 2**31 - 1
"""Most elements of a slot that a file may name."""


class RecordingFileError(ValueError):
    """A file that is no recording, or one that cannot be right; says what, and in which step and slot."""


# -- the file's types, derived from the dataclasses ------------------------------------------------------------------

_CHOICES = {(Slot, "scope"): SCOPES, (Change, "role"): events.ROLES, (Barrier, "kind"): events.BARRIERS}
_CHOICES[Recording, "source"] = ("program", "kernel")
_INT = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_LENGTH = Annotated[int, msgspec.Meta(ge=0, le=LONGEST)]
_EVENTS = get_args(Event)
_RECORDS: dict[Any, type[msgspec.Struct]] = {}
_Convert = Callable[[Any], Any]


def _file_type(hint: Any, length: bool = False) -> Any:
    """The type in the file of what a dataclass's field holds."""
    if hint is int:
        return _LENGTH if length else _INT
    args = tuple(_file_type(a, length) for a in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return Union[args]  # noqa: UP007
    if get_origin(hint) in (tuple, dict):
        return get_origin(hint)[args]
    return _RECORDS.get(hint, hint)


def _derive(cls: type, tag: str | None = None, head: tuple[tuple[str, Any], ...] = ()) -> type[msgspec.Struct]:
    hints = get_type_hints(cls)
    fields: list[Any] = list(head)
    for f in dataclasses.fields(cls):
        kind = _file_type(hints[f.name], length=f.name == "shape")
        if (cls, f.name) in _CHOICES:
            kind = Literal[_CHOICES[cls, f.name]]
        elif hints[f.name] == tuple[cls, ...]:  # type: ignore[valid-type]
            kind = f"tuple[_{cls.__name__}, ...]"
        if f.default is not dataclasses.MISSING:
            fields.append((f.name, kind, f.default))
        elif f.default_factory is not dataclasses.MISSING:
            fields.append((f.name, kind, msgspec.field(default_factory=f.default_factory)))
        else:
            fields.append((f.name, kind))
    made = msgspec.defstruct(
        cls.__name__,
        fields,
        tag=tag,
        tag_field="type" if tag else None,
        omit_defaults=True,
        forbid_unknown_fields=True,
        module=__name__,
        gc=False,
        namespace={"__doc__": (cls.__doc__ or "").split("\n")[0]},
    )
    _RECORDS[cls] = made
    return made


for _cls in (Values, Trace, Part, *_EVENTS, Slot, Finding, Source):
    _derive(_cls, _cls.__name__.lower() if _cls in _EVENTS else None)
_Step = _derive(Step)
_HEAD = (("format", Literal[FORMAT]), ("version", Literal[VERSION]))
_File: Any = _derive(Recording, head=_HEAD)


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def _nested(hint: Any, convert: Callable[[type], _Convert]) -> _Convert | None:
    """How to convert the records inside a field, None where it holds none."""
    if hint in _RECORDS:
        return convert(hint)
    inner = [a for a in get_args(hint) if a is not type(None) and a is not ...]
    if get_origin(hint) is tuple and len(inner) == 1:
        one = _nested(inner[0], convert)
        return None if one is None else lambda items: tuple([one(x) for x in items])
    if get_origin(hint) in (Union, UnionType) and any(a in _RECORDS for a in inner):
        if len(inner) == 1:
            only = convert(inner[0])
            return lambda x: None if x is None else only(x)
        each = {(_RECORDS[a] if convert is _loader else a): convert(a) for a in inner}
        return lambda x: each[type(x)](x)
    return None


def _converter(cls: type, target: Callable[..., Any], convert: Callable[[type], _Convert]) -> _Convert:
    hints = get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    fields = operator.attrgetter(*names)
    inside: list[tuple[int, _Convert]] = []

    def run(record: Any) -> Any:
        values = list(fields(record))
        for n, one in inside:
            values[n] = one(values[n])
        return target(*values)

    _cache[convert, cls] = run
    inside += [(n, one) for n, name in enumerate(names) if (one := _nested(hints[name], convert))]
    return run


_cache: dict[tuple[Any, type], _Convert] = {}


def _loader(cls: type) -> _Convert:
    return _cache.get((_loader, cls)) or _converter(cls, cls, _loader)


def _dumper(cls: type) -> _Convert:
    made = _RECORDS[cls]
    target = (lambda *values: made(FORMAT, VERSION, *values)) if cls is Recording else made
    return _cache.get((_dumper, cls)) or _converter(cls, target, _dumper)


# -- what a user calls -----------------------------------------------------------------------------------------------


def dumps(recording: Any) -> bytes:
    """A run's recording, or a recording, as JSON.

    Raises:
        RecordingFileError: it could not be read back; says what is wrong with it.
    """
    file = _dumper(Recording)(as_recording(recording))
    _check(file, "recording")
    return msgspec.json.encode(file)


def loads(data: bytes, name: str = "recording") -> Recording:
    """The recording that JSON holds; ``name`` is what messages call it.

    Raises:
        RecordingFileError: naming what is wrong, and the step and the slot where it is in one.
    """
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise RecordingFileError(f'{name} is no flashviz recording: it lacks "format": "{FORMAT}"')
        if head.version != VERSION:
            newer = head.version > VERSION
            hint = "it was written by a newer flashviz: update flashviz" if newer else "no flashviz wrote it"
            raise RecordingFileError(f"{name} has version {head.version}, this flashviz reads {VERSION}; {hint}")
        with no_collector():
            file = msgspec.json.decode(data, type=_File)
            _check(file, name)
            recording: Recording = _loader(Recording)(file)
    except msgspec.ValidationError as error:
        raise RecordingFileError(f"{name}{_place(data, str(error))}: {error}") from None
    except RecursionError:
        raise RecordingFileError(f"{name} is nested too deeply to be a recording") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        what = "is truncated" if "truncated" in str(error) else "is not JSON"
        raise RecordingFileError(f"{name} {what}, {len(data):,} bytes: {error}") from None
    return recording


def save_json(recording: Any, path: str | os.PathLike[str]) -> Path:
    """Write a run's recording, or a recording: the file appears whole or not at all."""
    target = Path(path)
    data = dumps(recording)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        partial.write_bytes(data)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a recording that :func:`flashviz.save` wrote as ``.json``.

    Raises:
        RecordingFileError: naming the file, what is wrong, and the step and the slot where it is in one.
        OSError: there is no such file.
    """
    return loads(Path(path).read_bytes(), str(path))


def schema() -> dict[str, Any]:
    """The JSON schema of the file format."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**head, "title": f"flashviz recording, version {VERSION}", **_sorted(msgspec.json.schema(_File))}


def _sorted(node: Any) -> Any:
    """The same schema, its alternatives in an order that does not depend on the version of msgspec."""
    if isinstance(node, dict):
        free = ("anyOf", "enum", "required")
        made = {k: _sorted(v) for k, v in sorted(node.items())}
        return {k: sorted(v, key=json.dumps) if k in free else v for k, v in made.items()}
    return [_sorted(v) for v in node] if isinstance(node, (list, tuple)) else node


# -- what a recording must be: checked on the file's types, before anything is made of them --------------------------

_Refuse = Callable[..., NoReturn]


def _check(file: Any, name: str) -> None:
    """Refuse slots, events and steps that do not fit together."""

    def refuse(what: str, event: int = -1, slot: str = "") -> NoReturn:
        where = f" {_step_text(file.steps, event)}event {event}" if event >= 0 else ""
        raise RecordingFileError(f"{name}{',' * bool(where)}{where}{f', slot {slot!r}' if slot else ''}: {what}")

    slots: dict[str, Any] = {}
    for slot in file.slots:
        if not slot.name or slot.name in slots:
            refuse("declared twice" if slot.name else "a slot has no name", slot=slot.name)
        if not _itemsize(slot.dtype):
            refuse(f"unknown dtype {slot.dtype!r}", slot=slot.name)
        if math.prod(slot.shape) > LONGEST:
            refuse(f"its shape {shape_text(slot.shape)} has more than {LONGEST:,} elements", slot=slot.name)
        slots[slot.name] = slot
    _check_events(file.events, slots, refuse)

    launches = sum(type(e) is _RECORDS[Launch] for e in file.events)
    _check_steps(file.steps, 0, len(file.events), launches, "step", refuse)
    for finding in file.findings:
        if finding.slot not in slots:
            refuse("a finding names it, and there is no such slot", slot=finding.slot)
        if not 0 <= finding.step < len(file.steps):
            refuse(f"a finding names step {finding.step} of {len(file.steps)}", slot=finding.slot)
    for source in file.code:
        lines = source.text.count("\n") + 1
        for action, first, last in source.lines:
            if not 1 <= first <= last <= lines:
                refuse(f"action {action!r} has lines {first} to {last} of {source.name}, which has {lines}")
    for key, value in file.params.items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(f"param {key} is {value}: JSON has no such number")


def _check_events(found: tuple[Any, ...], slots: dict[str, Any], refuse: _Refuse) -> None:
    launches = 0
    for n, event in enumerate(found):
        kind = type(event)
        if kind is _RECORDS[Launch]:
            if event.launch != launches:
                refuse(f"launch {event.launch} where launch {launches} comes next", n)
            launches += 1
        elif not -1 <= event.launch < launches:
            refuse(f"launch {event.launch} was never launched", n)
        if kind is _RECORDS[Move]:
            if not event.parts:
                refuse("a move without parts", n)
            tiles = [(part, part.dst, part.dtype, (part.src, part.dst, *part.reads)) for part in event.parts]
        elif kind is _RECORDS[Change]:
            dtype = slots[event.slot].dtype if event.slot in slots else ""
            tiles = [(event, event.slot, dtype, (event.slot, *event.reads))]
        else:
            continue
        for tile, slot, dtype, names in tiles:
            for name in names:
                if name not in slots:
                    known = ", ".join(sorted(slots)[:20]) or "none"
                    refuse(f"there is no such slot; this recording has {known}", n, name)
            shape, most, values = tile.shape, slots[slot].shape, tile.values
            if len(shape) != len(most) or any(map(operator.gt, shape, most)):
                refuse(f"a tile of {shape_text(shape)} does not fit a slot of {shape_text(most)}", n, slot)
            if not _itemsize(dtype):
                refuse(f"unknown dtype {dtype!r}", n, slot)
            if values is None:
                continue
            if values.shape != shape or values.dtype != dtype:
                got = f"{values.dtype} {shape_text(values.shape)}"
                refuse(f"values of {got} for a tile of {dtype} {shape_text(shape)}", n, slot)
            if len(values.data) != math.prod(shape) * _itemsize(dtype):
                refuse(f"{len(values.data)} bytes of values for a tile of {dtype} {shape_text(shape)}", n, slot)


def _check_steps(steps: tuple[Any, ...], first: int, end: int, launches: int, what: str, refuse: _Refuse) -> None:
    """Steps lie one after the other within ``[first, end)``, and so do the parts within each."""
    at = first
    for n, step in enumerate(steps):
        here = f'{what} {n} "{step.label}"'
        if not first <= step.first <= step.end <= end:
            refuse(f"{here} has events {step.first} to {step.end}, outside {first} to {end}")
        if step.first < at:
            refuse(f"{here} begins at event {step.first}, before the end of the one before it ({at})")
        if not -1 <= step.launch < launches:
            refuse(f"{here} belongs to launch {step.launch}, which was never launched")
        at = step.end
        _check_steps(step.parts, step.first, step.end, launches, f"{here}, part", refuse)


def _step_text(steps: tuple[Any, ...], event: int) -> str:
    """Which step an event is in, for messages: ``'step 4 "load Qi", '``."""
    inside = [f'step {n} "{s.label}", ' for n, s in enumerate(steps) if s.first <= event < s.end]
    return inside[0] if inside else ""


def _place(data: bytes, error: str) -> str:
    """Where msgspec's path ``$.events[7].parts[0]`` is, in a reader's words; never raises."""
    found = re.search(r"\$\.(slots|events|steps)\[(\d+)\]", error)
    if found is None:
        return ""
    try:
        raw, what, n = json.loads(data), found[1], int(found[2])
        item = raw[what][n]
        if what == "slots":
            return f", slot {item.get('name')!r}"
        if what == "steps":
            return f', step {n} "{item.get("label")}"'
        holders = [k for k, s in enumerate(raw["steps"]) if s["first"] <= n < s["end"]]
        step = f'step {holders[0]} "{raw["steps"][holders[0]]["label"]}", ' if holders else ""
        named = item.get("slot") or ", ".join(p["dst"] for p in item.get("parts", ()))
        return f", {step}event {n}" + (f", slot {named!r}" if named else "")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return ""


@functools.lru_cache(maxsize=256)
def _itemsize(dtype: str) -> int:
    """Bytes of an element, 0 where the name is not that of real numbers."""
    if dtype == BFLOAT16:
        return itemsize_of(dtype)
    try:
        known = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):
        return 0
    return known.itemsize if known.name == dtype and known.kind in "biuf" else 0


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2, ensure_ascii=False))
