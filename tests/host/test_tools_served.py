"""The commands and the openai example against one running server."""

from __future__ import annotations

import json
import re

import pytest
from served import TINY, example, serve

from sglang_csa2 import envs
from sglang_csa2.__main__ import main
from sglang_csa2.tools.budget import CSA2, GIB, Budget, Serving
from sglang_csa2.tools.plan import read_model

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(tiny_model, traces):
    arguments = ["--chunked-prefill-size", "512", "--served-model-name", "tiny", "--enable-cache-report"]
    with serve(*arguments, env={envs.TRACE: str(traces)}) as server:
        yield server


def test_plan_agrees_with_the_server(server, capsys):
    """Bytes per token, window slots and reserves exactly; tokens within the rounding of the budget in the log."""
    (line,) = re.findall(r"DSV4 memory calculation: (.*)", server.log)
    logged = dict(re.findall(r"(\w+)=([\d.]+)", line))
    (swa_tokens,) = set(re.findall(r"mode=cap, swa_tokens=(\d+)", server.log))
    sizes = ["--concurrency", "8", "--context", "4096", "--chunk", "512"]
    assert main(["plan", "--model", str(TINY), "--kv-gib", logged["available_bytes"], *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    mine = report["layouts"][0]
    assert mine["bytes_per_token"] == float(logged["bytes_per_full_token"])
    assert mine["swa_tokens"] == int(swa_tokens)
    assert round(mine["swa_bytes"] / GIB, 2) == float(logged["swa_fixed"])
    assert mine["max_total_num_tokens"] == pytest.approx(int(logged["full_token"]), rel=0.01)
    # And what was allocated, at the 16,384 tokens that the server was limited to.
    budget = Budget(read_model(TINY)[1], CSA2, Serving(8, 4096, chunked_prefill_size=512))
    assert "max_total_num_tokens=16384" in server.log
    assert sum(budget.buffers(16384).values()) < sum(mine["buffers"].values())


def test_openai_client(server):
    out = example("openai_client.py", "--url", server.url)
    assert re.search(r"chat: '.+'", out) and out.count("|") >= 3
    (cold, warm) = re.findall(r"long context: (\d+) tokens, (\d+) of them", out)
    assert int(cold[0]) > 1000 and int(cold[1]) == 0 and int(warm[1]) >= 512
    assert "the same answer twice" in out


def test_show_what_the_server_read(server, traces, tmp_path, capsys):
    for old in traces.glob("forward-*.pt"):
        old.unlink()
    server.generate(list(range(3, 603)), 2)
    picture = tmp_path / "trace.png"
    assert main(["show", "--model", str(TINY), "--trace-from", str(traces), "--out", str(picture)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +2 +full +64 of 300 ", out, re.MULTILINE)
    assert re.search(r"^ +9 +reindex +64 of 601 +[\d.]+% +[\d.]+% ", out, re.MULTILINE)
    assert "of 601 rows" in out and picture.stat().st_size > 10_000


def test_verify(server, tmp_path, capsys):
    """Against the plain model, then against the server's own record, then against a record that was changed."""
    model, short = ["--model", str(TINY), "--url", server.url], ["--lengths", "3", "300"]
    assert main(["verify", *model, *short]) == 0
    out = capsys.readouterr().out
    assert out.count("pass ") == 4 and out.endswith("PASS\n") and "256 of 300 tokens from the prefix cache" in out
    record = tmp_path / "record.json"
    assert main(["verify", *model, *short, "--record", str(record)]) == 0
    assert main(["verify", *model, *short, "--against", str(record)]) == 0
    kept = json.loads(record.read_text())
    kept["answers"][1]["logprobs"] = [value - 0.1 for value in kept["answers"][1]["logprobs"]]
    record.write_text(json.dumps(kept))
    capsys.readouterr()
    assert main(["verify", *model, *short, "--against", str(record)]) == 1
    assert "FAIL  against record.json, prompt of 300" in capsys.readouterr().out
    assert main(["verify", *model, "--lengths", "5", "--against", str(record)]) == 2
    assert "--lengths it was recorded with (3 300)" in capsys.readouterr().err
