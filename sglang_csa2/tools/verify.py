"""`python -m sglang_csa2 verify`: does a server compute what the model is? What to run after an upgrade.

    verify --model M                            an engine on this CPU, log-probabilities and selections
    verify --model M --url http://...           a running server, log-probabilities, prefix cache, batches
    verify --model M --url ... --record F       keep a server's answers (any checkpoint, however large)
    verify --model M --url ... --against F      compare with answers that were kept

The first two compare with the plain model (`reference_model`), which computes small bf16 checkpoints.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_csa2.reference_model import ReferenceModel
from sglang_csa2.tools import checks
from sglang_csa2.tools.checks import Check, Expectation
from sglang_csa2.tools.plan import read_model

# Below the window; across it; where the tiny model's pool begins to leave things out; where faults show best.
_LENGTHS = [3, 130, 300, 700]


class VerifyError(ValueError):
    """Arguments of `verify` that do not go together, or a recording of something else."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="the folder of the served model")
    parser.add_argument("--url", help="a running server; without it an engine is started here, on the CPU")
    parser.add_argument("--lengths", type=int, nargs="+", default=_LENGTHS, help="tokens of each prompt")
    parser.add_argument("--bound", type=float, default=checks.MEAN_BOUND, help="largest mean difference of a prompt")
    parser.add_argument("--share", type=float, default=checks.SHARE_BOUND, help="smallest share of equal entries")
    parser.add_argument("--record", type=Path, help="write the server's answers to this file and compare nothing")
    parser.add_argument("--against", type=Path, help="compare with a file that --record wrote, not the plain model")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    if arguments.record and arguments.against:
        raise VerifyError("--record writes answers and --against reads them: give one of them")
    if not arguments.url and (arguments.record or arguments.against):
        raise VerifyError("--record and --against are about a running server: give its --url")
    if min(arguments.lengths) < 2:
        raise VerifyError(f"--lengths has {min(arguments.lengths)}: a prompt needs 2 tokens for a log-probability")
    settings, _, _ = read_model(arguments.model)
    asked = checks.prompts(settings["vocab_size"], arguments.lengths)
    if arguments.record:
        return _record(arguments, asked)
    results = _check_server(arguments, asked) if arguments.url else _check_engine(arguments, asked)
    print(json.dumps([asdict(check) for check in results], indent=1) if arguments.json else _verdict(results))
    return 0 if all(check.passed for check in results) else 1


def _check_server(arguments: argparse.Namespace, asked: list[list[int]]) -> list[Check]:
    server = checks.HttpServer(arguments.url)
    if arguments.against:
        expected, name = _recorded(arguments.against, asked), f"against {arguments.against.name}"
    else:
        expected, name = _expectations(ReferenceModel(arguments.model), asked)[0], "against the plain model"
    answers = [server.answer(ids) for ids in asked]
    return [
        *checks.check_answers(asked, answers, expected, arguments.bound, name),
        checks.check_repeats(server, asked, arguments.bound),
        checks.check_together(server, asked, answers, arguments.bound),
    ]


def _check_engine(arguments: argparse.Namespace, asked: list[list[int]]) -> list[Check]:
    from sglang_csa2.tools.served import TracedEngine

    # First, because it refuses what it cannot compute before an engine is started.
    model = ReferenceModel(arguments.model)
    expected, chosen = _expectations(model, asked)
    answers, recordings = [], []
    with TracedEngine(arguments.model, model.plan, skip_tokenizer_init=True) as engine:
        for ids in asked:
            raw, recording = engine.run(ids, return_logprob=True, logprob_start_len=0)
            answers.append(checks.prompt_answer(raw))
            recordings.append(recording)
    return [
        *checks.check_answers(asked, answers, expected, arguments.bound, "against the plain model"),
        *checks.check_selections(recordings, chosen, arguments.share),
    ]


def _expectations(model: ReferenceModel, asked: list[list[int]]) -> tuple[list[Expectation], list[dict[int, Any]]]:
    expected, chosen = [], []
    for ids in asked:
        after, carried = model.log_probabilities(ids)
        best = after[-1].topk(2)
        logprobs = [after[row, token].item() for row, token in enumerate(ids[1:])]
        expected.append(Expectation(logprobs, int(best.indices[0]), (best.values[0] - best.values[1]).item()))
        chosen.append(carried.chosen)
    return expected, chosen


def _record(arguments: argparse.Namespace, asked: list[list[int]]) -> int:
    server = checks.HttpServer(arguments.url)
    info = server.info()
    about = {key: info.get(key) for key in ("version", "model_path", "attention_backend", "tp_size", "device")}
    answers = []
    for ids in asked:
        best = sorted(server.top_logprobs(ids)[0].values(), reverse=True)
        answers.append({**asdict(server.answer(ids)), "margin": best[0] - best[1]})
    arguments.record.write_text(json.dumps({"server": about, "prompts": asked, "answers": answers}))
    print(f"wrote {len(asked)} answers of {about} to {arguments.record}")
    return 0


def _recorded(path: Path, asked: list[list[int]]) -> list[Expectation]:
    kept = json.loads(path.read_text())
    if kept["prompts"] != asked:
        lengths = " ".join(str(len(ids)) for ids in kept["prompts"])
        raise VerifyError(f"{path} holds answers to other prompts: give the --lengths it was recorded with ({lengths})")
    return [Expectation(**answer) for answer in kept["answers"]]


def _verdict(results: list[Check]) -> str:
    width = max(len(check.name) for check in results)
    lines = [f"{'pass' if check.passed else 'FAIL'}  {check.name:{width}}  {check.figures}" for check in results]
    failed = sum(not check.passed for check in results)
    return "\n".join([*lines, "PASS" if not failed else f"FAIL: {failed} of {len(results)} checks"])
