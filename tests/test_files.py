"""Recordings as files: what is written is what is read, and a file that cannot be right is refused, naming where."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from performances import performances

import flashviz as fv
from flashviz import Recording, files
from flashviz.files import RecordingFileError, dumps, load, loads, save_json


@pytest.fixture(scope="module")
def run():
    rng = np.random.default_rng(0)
    return fv.flash_attention_2(*rng.normal(size=(3, 2, 6, 2)), Br=4, Bc=4, device="numpy")


@pytest.fixture(scope="module")
def raw(run):
    """The file's JSON; tests change a copy."""
    return json.loads(dumps(run))


@given(performances())
def test_what_is_written_is_what_is_read(performance):
    recording = performance.recording
    again = loads(dumps(recording))
    assert again == recording
    assert dumps(again) == dumps(recording)
    for n in range(len(recording.steps)):
        for slot in recording.slots:
            assert again.content(n, slot.name) == recording.content(n, slot.name)


def test_a_traced_recording_is_what_is_read():
    from flashviz.events import Begin, Launch, Move, Part, Step, Trace
    from flashviz.slots import Block, Slot, Values

    trace = Trace("producer", 131, 2**60 + 1, 2**60 + 7)
    slots = (Slot("x0", "hbm", "grid", (2,), "float16", "x"), Slot("X", "tensor memory", "warp", (2,), "float16"))
    part = Part("x0", "X", (1,), "float16", ("x0",), Values.of(np.array([-np.inf], "float16")))
    block = Block(1, 2, 3)
    events = (
        Launch(0, "k", (1, 2, 3), (4, 5, 6), trace),
        Begin(0, block, trace),
        Move((part,), 0, block, 1, True, 2, "g", trace),
    )
    steps = (Step("a", "b", "", 0, 3, 0, block, (("j", 1),), (Step("p", "q", "load", 1, 3, 0, block),)),)
    recording = Recording("x", "kernel", "gpu", {"a": 1, "b": 1.0, "c": True, "d": "é"}, slots, events, steps)
    again = loads(dumps(recording))
    assert again == recording
    assert isinstance(again.steps[0].block, Block)
    assert [type(again.params[k]) for k in "abcd"] == [int, float, bool, str]


def test_values_keep_every_bit(run):
    again = loads(dumps(run)).values(-1, "mi")
    assert again.tobytes() == run.recording.values(-1, "mi").tobytes()
    start = next(n for n, s in enumerate(run.recording.steps) if "load Qi" in s.label)
    assert np.isneginf(loads(dumps(run)).values(start, "mi")).all()


def test_save_and_load(run, tmp_path):
    path = save_json(run, tmp_path / "fa2.json")
    assert path == tmp_path / "fa2.json"
    assert load(path) == load(str(path)) == fv.load(path) == run.recording
    save_json(run.recording, path)
    assert load(path) == run.recording
    assert [p.name for p in tmp_path.iterdir()] == ["fa2.json"]
    assert path.stat().st_mode & 0o600 == 0o600


def test_a_save_that_fails_leaves_the_file_as_it_was(run, tmp_path, monkeypatch):
    path = save_json(run, tmp_path / "fa2.json")
    before = path.read_bytes()

    def full(self, target):
        raise OSError("no space left")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="no space left"):
        save_json(run, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["fa2.json"]


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError):
        save_json(Recording("x"), tmp_path / "no" / "x.json")


# -- the format ------------------------------------------------------------------------------------------------------


def test_the_published_schema_is_that_of_the_code(root):
    stored = (root / "docs" / "recording.schema.json").read_text(encoding="utf-8")
    command = [sys.executable, "-m", "flashviz.files"]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    assert json.loads(printed) == json.loads(json.dumps(files.schema()))
    assert stored == printed, "run: python -m flashviz.files > docs/recording.schema.json"


@settings(max_examples=10)
@given(performances(most=8))
def test_files_fit_the_schema(performance):
    jsonschema.Draft202012Validator(files.schema()).validate(json.loads(dumps(performance.recording)))


def test_the_schema_refuses_what_the_code_refuses(raw):
    check = jsonschema.Draft202012Validator(files.schema())
    assert check.is_valid(raw)
    for change in ({"version": 2}, {"format": "other"}, {"extra": 1}, {"slots": [{"name": "x"}]}):
        assert not check.is_valid({**raw, **change})


def test_the_head_comes_first_and_says_format_and_version(run):
    assert dumps(run).startswith(b'{"format":"flashviz-recording","version":1,"algorithm":"flash_attention_2"')


# -- what is refused -------------------------------------------------------------------------------------------------


def find(raw, label, kind):
    """The number of a step and of its first event of a kind."""
    n = next(n for n, s in enumerate(raw["steps"]) if s["label"] == label)
    step = raw["steps"][n]
    return n, next(e for e in range(step["first"], step["end"]) if raw["events"][e]["type"] == kind)


FILL = "head 1 · block 0 · j = 1 · fill Sij"
LOAD = "head 0 · block 1 · load Qi"
PLACES = {"fill": (FILL, "change"), "load": (LOAD, "move")}


def event(place, change):
    """A fault in one event of a step, whose number and label the message must give."""

    def apply(raw):
        label, kind = PLACES[place]
        n, at = find(raw, label, kind)
        change(raw["events"][at])
        return [f'step {n} "{label}"', f"event {at}"]

    return apply


def whole(change, *says):
    def apply(raw):
        change(raw)
        return list(says)

    return apply


def step_of(n, change, *says):
    def apply(raw):
        change(raw["steps"], n)
        return [f'step {n} "{raw["steps"][n]["label"]}"', *says]

    return apply


def part(change):
    return lambda e: change(e["parts"][0])


FINDING = {"kind": "read-empty", "slot": "Qi", "launch": 0, "block": [0, 0, 0], "step": 0, "message": "m"}
FAULTS = {
    "change of an unknown slot": (event("fill", lambda e: e.update(slot="Zij")), "slot 'Zij'", "no such slot"),
    "change reads an unknown slot": (event("fill", lambda e: e["reads"].append("Zj")), "slot 'Zj'"),
    "move from an unknown slot": (event("load", part(lambda p: p.update(src="Z0"))), "slot 'Z0'"),
    "move into an unknown slot": (event("load", part(lambda p: p.update(dst="Zi"))), "slot 'Zi'"),
    "move reads an unknown slot": (event("load", part(lambda p: p.update(reads=["Z0"]))), "slot 'Z0'"),
    "unknown role": (event("fill", lambda e: e.update(role="paint")), "slot 'Sij'", "'paint'"),
    "unknown type": (event("fill", lambda e: e.update(type="paint")), "'paint'"),
    "unknown field": (event("fill", lambda e: e.update(colour="red")), "slot 'Sij'", "`colour`"),
    "unknown field of a part": (event("load", part(lambda p: p.update(colour="red"))), "slot 'Qi'", "`colour`"),
    "missing field": (event("fill", lambda e: e.pop("level")), "slot 'Sij'", "`level`"),
    "level is a fraction": (event("fill", lambda e: e.update(level=1.5)), "slot 'Sij'"),
    "level is enormous": (event("fill", lambda e: e.update(level=10**30)), "slot 'Sij'"),
    "level is text": (event("fill", lambda e: e.update(level="1")), "slot 'Sij'"),
    "negative shape": (event("fill", lambda e: e.update(shape=[-1, 2])), "slot 'Sij'"),
    "enormous shape": (event("fill", lambda e: e.update(shape=[10**12, 2])), "slot 'Sij'"),
    "shape larger than the slot": (event("fill", lambda e: e.update(shape=[4, 5])), "4 × 5", "4 × 4", "slot 'Sij'"),
    "shape of other axes": (event("fill", lambda e: e.update(shape=[4])), "slot 'Sij'"),
    "values of another shape": (event("fill", lambda e: e["values"].update(shape=[1, 1])), "slot 'Sij'", "1 × 1"),
    "values of another dtype": (event("fill", lambda e: e["values"].update(dtype="int32")), "slot 'Sij'", "int32"),
    "bytes that do not fit": (event("fill", lambda e: e["values"].update(data="AAAA")), "slot 'Sij'", "3 bytes"),
    "bytes that are no base64": (event("fill", lambda e: e["values"].update(data="?")), "slot 'Sij'"),
    "unknown dtype": (event("load", part(lambda p: p.update(dtype="float31"))), "slot 'Qi'", "float31"),
    "object dtype": (event("load", part(lambda p: p.update(dtype="object"))), "slot 'Qi'", "object"),
    "move of nothing": (event("load", lambda e: e.update(parts=[])), "without parts"),
    "launch that never was": (event("load", lambda e: e.update(launch=7)), "launch 7"),
    "barrier kind": (
        lambda raw: (lambda at: (raw["events"][at[1]].update(kind="galaxy"), [f"step {at[0]} ", f"event {at[1]}"])[1])(
            find(raw, FILL, "barrier")
        ),
        "'galaxy'",
    ),
    "a second launch 0": (
        whole(lambda r: r["events"].append(next(e for e in r["events"] if e["type"] == "launch"))),
        "launch 0",
    ),
    "scope": (whole(lambda r: r["slots"][0].update(scope="cosmos")), "slot 'Qi'", "'cosmos'"),
    "slot dtype": (whole(lambda r: r["slots"][0].update(dtype="float31")), "slot 'Qi'", "float31"),
    "slot shape": (whole(lambda r: r["slots"][0].update(shape=[2**20, 2**20])), "slot 'Qi'", "1048576 × 1048576"),
    "slot without a name": (whole(lambda r: r["slots"][0].update(name="")), "no name"),
    "slot twice": (whole(lambda r: r["slots"].append(r["slots"][0])), "slot 'Qi'", "twice"),
    "step out of the events": (step_of(-1 % 19, lambda s, n: s[n].update(end=10**6)), "1000000"),
    "step backwards": (step_of(4, lambda s, n: s[n].update(end=s[n]["first"] - 1)), "outside"),
    "step before the first": (step_of(0, lambda s, n: s[n].update(first=-1)), "outside"),
    "steps overlap": (
        step_of(5, lambda s, n: s[n].update(first=s[n]["first"] - 1)),
        "before the end of the one before",
    ),
    "parts leave their step": (
        step_of(3, lambda s, n: s[n]["parts"][1].update(end=s[n]["end"] + 1)),
        'part 1 "load Vj"',
    ),
    "parts overlap": (step_of(3, lambda s, n: s[n]["parts"][1].update(first=s[n]["first"])), 'part 1 "load Vj"'),
    "step of no launch": (step_of(4, lambda s, n: s[n].update(launch=3)), "launch 3"),
    "step field": (step_of(4, lambda s, n: s[n].update(onclick="x")), "`onclick`"),
    "finding of no slot": (
        whole(lambda r: r.update(findings=[{**FINDING, "slot": "Z"}])),
        "slot 'Z'",
    ),
    "finding of no step": (
        whole(lambda r: r.update(findings=[{**FINDING, "step": 99}])),
        "step 99",
    ),
    "code lines": (whole(lambda r: r["code"][0]["lines"].append(["load_x", 5, 10**6])), "'load_x'", "1000000"),
    "block of four": (event("load", lambda e: e.update(block=[0, 0, 0, 0])), "slot 'Qi'"),
    "top-level field": (whole(lambda r: r.update(script="x")), "`script`"),
    "source": (whole(lambda r: r.update(source="hearsay")), "'hearsay'"),
    "param null": (whole(lambda r: r["params"].update(scale=None)), "null"),
    "newer": (whole(lambda r: r.update(version=2)), "version 2", "written by a newer flashviz: update"),
    "older": (whole(lambda r: r.update(version=0)), "version 0"),
    "version text": (whole(lambda r: r.update(version="1")), "version"),
    "newer, in another shape": (
        whole(lambda r: (r.clear(), r.update(format="flashviz-recording", version=9))),
        "update flashviz",
    ),
    "format": (whole(lambda r: r.update(format="other")), "no flashviz recording"),
    "no format": (whole(lambda r: r.pop("format")), "no flashviz recording"),
}


@pytest.mark.parametrize(("fault", "says"), [(f[0], f[1:]) for f in FAULTS.values()], ids=FAULTS)
def test_refused_naming_the_file_and_the_place(raw, tmp_path, fault, says):
    changed = copy.deepcopy(raw)
    places = fault(changed)
    path = tmp_path / "strange.json"
    path.write_text(json.dumps(changed), encoding="utf-8")
    with pytest.raises(RecordingFileError) as refused:
        load(path)
    message = str(refused.value)
    assert message.startswith(str(path))
    for text in (*places, *says):
        assert text in message
    assert "\n" not in message


def test_steps_out_of_order(raw):
    changed = copy.deepcopy(raw)
    steps = changed["steps"]
    steps[5], steps[6] = steps[6], steps[5]
    with pytest.raises(
        RecordingFileError, match='step 6 "head 0 · block 0 · j = 0 · update mi, li and Oi" begins at event 32, before'
    ):
        loads(json.dumps(changed).encode())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "is truncated, 0 bytes"),
        (b"{", "is truncated"),
        (b"<html>", "is not JSON"),
        (b"\x89PNG\r\n", "is not JSON"),
        (b'{"format":"\xff"}', "is not JSON"),
        (b"[]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b"{}", "no flashviz recording"),
        (b'{"format":"flashviz-recording","version":NaN}', "is not JSON"),
        (b'{"format":"flashviz-recording","version":1}', "`algorithm`"),
        (b"[" * 100_000, "Expected `object`"),
        (b'{"x":' * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_recording(data, says):
    with pytest.raises(RecordingFileError, match=f"^recording.*{says}"):
        loads(data)


def test_deeply_nested_steps_are_refused():
    step = '{"label":"a","caption":"","action":"","first":0,"end":0,"parts":['
    head = '{"format":"flashviz-recording","version":1,"algorithm":"x","steps":['
    assert len(loads((head + step * 50 + "]}" * 50 + "]}").encode()).steps) == 1
    for depth in (5_000, 50_000):
        with pytest.raises(RecordingFileError, match="nested too deeply"):
            loads((head + step * depth + "]}" * depth + "]}").encode())


def test_every_truncation_is_refused(raw):
    small = dumps(Recording("x"))
    for n in range(len(small)):
        with pytest.raises(RecordingFileError, match="truncated"):
            loads(small[:n])
    data = json.dumps(raw).encode()
    for n in range(0, len(data), 997):
        with pytest.raises(RecordingFileError, match="truncated"):
            loads(data[:n])


@settings(max_examples=200)
@given(st.data())
def test_damage_is_refused_or_harmless_and_never_anything_else(run, data):
    whole = bytearray(dumps(run))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789"[]{},-'))
    try:
        recording = loads(bytes(whole))
    except RecordingFileError:
        return
    for n in range(len(recording.steps)):
        for slot in recording.slots:
            content = recording.content(n, slot.name)
            if content is not None and content.values is not None:
                assert content.values.array.shape == content.shape
    fv.traffic(recording)


def test_dumps_refuses_what_loads_would():
    slot = fv.Slot("x", "shared", "block", (2,), "complex64")
    with pytest.raises(RecordingFileError, match="recording, slot 'x': unknown dtype 'complex64'"):
        dumps(Recording("a", slots=(slot,)))
    with pytest.raises(RecordingFileError, match="param scale is nan"):
        dumps(Recording("a", params={"scale": float("nan")}))
    with pytest.raises(RecordingFileError, match="declared twice"):
        dumps(Recording("a", slots=(fv.Slot("x", "m", "grid", (1,)),) * 2))
    with pytest.raises(ValueError, match="record=False"):
        dumps(fv.flash_attention_2(*np.ones((3, 1, 1)), device="numpy", record=False))


def test_the_collector_is_as_it_was(run):
    assert gc.isenabled()
    loads(dumps(run))
    with pytest.raises(RecordingFileError):
        loads(b"{")
    assert gc.isenabled()
    gc.disable()
    try:
        loads(dumps(run))
        assert not gc.isenabled()
    finally:
        gc.enable()
