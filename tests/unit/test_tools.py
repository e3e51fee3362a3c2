"""The layer map, recordings, pictures and the checks of `verify`, without a server."""

from __future__ import annotations

import dataclasses
import math
import os
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from served import REPOSITORY, TINY

from sglang_csa2.__main__ import main
from sglang_csa2.tools import checks, layer_map, pictures
from sglang_csa2.tools.checks import Answer, Expectation
from sglang_csa2.tools.plan import read_model
from sglang_csa2.tools.recorded import Choices, Recording, TraceError, overlaps, read

FLASH = REPOSITORY / "configs" / "deepseek-v4.1-flash.json"


@pytest.fixture(scope="module")
def plan():
    return read_model(TINY)[1]


# The layer map -------------------------------------------------------------------


def test_map_as_text(capsys):
    assert main(["show", "--model", str(FLASH)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[21].split()[:5] == ["20", "full", "1", "20", "20"] and "2048 blocks of 8" in lines[21]
    assert lines[26].split()[:5] == ["25", "reuse", "1", "20", "24"]
    assert lines[-1].split()[:2] == ["30", "reuse"]


def test_map_as_svg(plan, tmp_path, capsys):
    assert main(["show", "--model", str(TINY), "--svg", str(tmp_path / "map.svg")]) == 0
    svg = (tmp_path / "map.svg").read_text()
    root = ElementTree.fromstring(svg)
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [f"layer {layer.layer_id}: {layer.role.value}" for layer in plan.layers]
    assert svg == layer_map.as_svg(plan)


def test_the_map_in_the_docs_is_current():
    svg = (REPOSITORY / "docs" / "images" / "layer-map.svg").read_text()
    assert svg == layer_map.as_svg(read_model(FLASH)[1])


# Recordings -----------------------------------------------------------------------


def forward(rows, request=3, chosen=None, blocks=None, unrestricted=None):
    """One recorded forward of the tiny plan, every index layer alike."""
    rows = torch.tensor(rows, dtype=torch.int32)
    positions = torch.full((len(rows), 64), -1, dtype=torch.int32)
    positions[:, :2] = torch.tensor(chosen or [0, 1], dtype=torch.int32)
    layer = {"positions": positions, "blocks": blocks, "unrestricted": unrestricted}
    return {"rows": rows, "requests": torch.full_like(rows, request), "layers": {i: dict(layer) for i in (2, 5, 7, 9)}}


def save(folder, *forwards):
    for index, one in enumerate(forwards):
        path = folder / f"forward-1-{index:06d}.pt"
        torch.save(one, path)
        os.utime(path, (index, index))


def test_reading_joins_the_last_request(plan, tmp_path):
    """Chunks and decode steps of one request; another request between them and an earlier owner of its slot."""
    save(tmp_path, forward([0, 1, 2]), forward([0, 1, 2, 3]), forward([9], request=1), forward([4]))
    with pytest.raises(TraceError, match="holds no forward"):
        read(tmp_path / "absent", plan)
    # A foreign forward ends the run: what lies before it may be another request's.
    assert read(tmp_path, plan).rows.tolist() == [4]
    (tmp_path / "forward-1-000002.pt").unlink()
    recording = read(tmp_path, plan)
    assert recording.rows.tolist() == [0, 1, 2, 3, 4] and recording.context == 5
    assert recording.layers[7].positions.shape == (5, 64)
    # Another rank wrote the same, and a decode was padded.
    other = tmp_path / "forward-2-000000.pt"
    torch.save(forward([0, 1, 2, 3]), other)
    os.utime(other, (2, 2))
    save(tmp_path, forward([0, 1, 2]), forward([0, 1, 2, 3]))
    torch.save(forward([4, -1]), tmp_path / "forward-1-000003.pt")
    os.utime(tmp_path / "forward-1-000003.pt", (3, 3))
    assert read(tmp_path, plan).rows.tolist() == [0, 1, 2, 3, 4]


def test_overlaps(plan):
    """Of two entries layer 7 shares one with its source, and kept one of four that it would have chosen."""
    rows = torch.tensor([199], dtype=torch.int32)

    def entries(*chosen):
        return torch.tensor([[*chosen, *[-1] * (64 - len(chosen))]], dtype=torch.int32)

    layers = {
        5: Choices(plan[5], entries(1, 2), None, None),
        7: Choices(plan[7], entries(2, 3), None, entries(3, 4, 5, 6)),
    }
    source, consumer = overlaps(Recording(rows, layers), plan)
    assert (source.with_source, source.recall) == (None, None)
    assert (consumer.with_source, consumer.recall, consumer.rows) == (0.5, 0.25, 1)
    # A row that sees no more than it may choose says nothing.
    assert overlaps(Recording(torch.tensor([50]), layers), plan)[1].recall is None


def test_pictures(plan, tmp_path):
    """The cells say what was read: white above the diagonal, the pool, the choice over it."""
    size, context = plan.config.candidate_block_size, 200
    rows = torch.arange(context, dtype=torch.int32)
    chosen = torch.full((context, 64), -1, dtype=torch.int32)
    chosen[150:, 0] = 9
    blocks = torch.full((context, 16), -1, dtype=torch.int32)
    blocks[150:, 0] = 1
    source = Choices(plan[5], chosen, blocks, None)
    consumer = Choices(plan[7], chosen, None, chosen)
    recording = Recording(rows, {5: source, 7: consumer})
    cells = pictures._cells(recording, consumer, source, plan)
    assert cells.shape == (context, context)
    assert (cells[0, 1:] == 0).all() and cells[0, 0] == 1
    row = cells[160]
    assert row[9] == 3 and (row[[8, *range(10, 2 * size)]] == 2).all() and row[2 * size] == 1 and row[161] == 0
    pictures.draw(recording, plan, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 10_000


def test_pictures_without_matplotlib(plan, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(pictures.MissingPlots, match=r"pip install 'sglang-csa2\[plots\]'"):
        pictures.draw(Recording(torch.arange(3), {}), plan, tmp_path / "no.png")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--out", "x.png"], "there is none"),
        (["--trace", "a", "--trace-from", "b"], "give one of them"),
        (["--trace-from", "/nonexistent"], "SGLANG_CSA2_TRACE"),
    ],
)
def test_show_names_bad_arguments(capsys, arguments, says):
    assert main(["show", "--model", str(TINY), *arguments]) == 2
    assert says in capsys.readouterr().err


# verify -------------------------------------------------------------------------


def judge(difference=0.0, next_id=5, margin=1.0):
    wanted = Expectation([-1.0] * 10, 5, margin)
    answer = Answer([-1.0 + difference] * 10, next_id)
    (check,) = checks.check_answers([[0] * 11], [answer], [wanted], bound=0.06, against="x")
    return check.passed


def test_answers_are_judged():
    assert judge() and judge(0.05) and not judge(0.07) and not judge(math.nan)
    assert not judge(next_id=6) and judge(next_id=6, margin=0.1)


def test_selections_are_judged(plan):
    rows = torch.tensor([150, 151], dtype=torch.int32)
    chosen = torch.arange(64).expand(2, 64)
    recording = Recording(rows, {7: Choices(plan[7], chosen, None, None)})

    def judged(plain):
        (check,) = checks.check_selections([recording], [{7: plain.expand(152, 64)}], bound=0.8)
        return check.passed

    fewer = torch.where(torch.arange(64) < 48, torch.arange(64), -1)
    assert judged(torch.arange(64)) and judged(torch.arange(64) + 10)
    assert not judged(torch.arange(64) + 20) and not judged(fewer)


@pytest.mark.parametrize(
    ("change", "length"),
    [({"index_topk": 48}, 300), ({"candidate_topk_blocks": 1000}, 700)],
    ids=["top-48", "no pool"],
)
def test_faults_fail_the_verdict(tiny_model, plan, change, length):
    """A model that chooses 48 entries for 64, or in no pool, is told from the right one; the pool needs a context."""
    from sglang_csa2.reference_model import ReferenceModel
    from sglang_csa2.tools.verify import _expectations

    model = ReferenceModel(tiny_model)
    (ids,) = checks.prompts(1024, [length])
    (wanted,), right = _expectations(model, [ids])
    model.plan = type(plan).from_config(dataclasses.replace(plan.config, **change))
    (faulty,), (chosen,) = _expectations(model, [ids])
    answer = Answer(faulty.logprobs, faulty.next_id)
    layers = {i: Choices(plan[i], _padded(positions), None, None) for i, positions in chosen.items()}
    found = checks.check_selections([Recording(torch.arange(len(ids)), layers)], right, checks.SHARE_BOUND)
    assert not found[-1].passed
    (check,) = checks.check_answers([ids], [answer], [wanted], checks.MEAN_BOUND, "x")
    assert not check.passed


def _padded(positions):
    """As wide as a server's buffers, whatever was chosen."""
    return torch.nn.functional.pad(positions, (0, 64 - positions.shape[1]), value=-1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--record", "a"], "give its --url"),
        (["--url", "http://127.0.0.1:9", "--record", "a", "--against", "b"], "give one of them"),
        (["--lengths", "1"], "needs 2 tokens"),
        (["--url", "http://127.0.0.1:9", "--record", "a"], "cannot be reached"),
    ],
)
def test_verify_names_bad_arguments(capsys, arguments, says):
    assert main(["verify", "--model", str(TINY), *arguments]) == 2
    assert says in capsys.readouterr().err
