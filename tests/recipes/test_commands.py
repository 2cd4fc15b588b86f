"""Commands. What comes after training: scores and texts of a run's model, under any layout, with the numbers of one
process. What comes before: ``recipes.check`` and ``recipes.plan``."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoConfig, MistralConfig, MixtralConfig

from recipes import check, commands, evaluate, generate, launch, plan, record, train
from recipes.generate import SETTINGS
from recipes.models.generation import Generation
from recipes.models.hf import CausalLM
from recipes.problem import ConfigError
from recipes.record import TEXTS
from tests.recipes.runs import QUIET, composed, done, problems, trained
from tests.recipes.tiny import SIZES, model, texts
from tools.workers.pool import WorkerError, WorkerPool
from tools.workers.worker import ROOT

SMALL = [
    "trainer.precision=64-true", "trainer.max_steps=2", "trainer.limit_val_batches=2", "optimizer.lr=0.02",
]  # fmt: skip


@pytest.fixture(scope="module")
def hf(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a pretrained model in a pipeline."""
    here = tmp_path_factory.mktemp("hf")
    given = ["model=hf", f"model.path={model(here / 'model')}", "data=hf", f"data.path={texts(here / 'a.jsonl')}"]
    given += ["data.context=32", "strategy=pipeline_1f1b", "strategy.microbatches=2", "cluster.devices=2"]
    return trained(pool, here / "run", *SMALL, *given)


# -- recipes.evaluate ------------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_run_under_another_layout(pool: WorkerPool, hf: Path, tmp_path: Path) -> None:
    config = commands.config_of("evaluate", hf, tmp_path / "scores", ["strategy=tensor_parallel"])
    found = record.read_metrics(done(pool, config))
    own = record.read_metrics(hf)["val_loss"]
    assert found["val_loss"] == pytest.approx(own, rel=0, abs=1e-6)  # transformers computes losses in float32
    assert found["test_loss"] is not None and found["test_loss"] != own
    for split in ("val", "test"):
        assert found[f"{split}_perplexity"] == pytest.approx(math.exp(found[f"{split}_loss"] or 0))
    assert record.read(tmp_path / "scores")["status"] == "completed"


def test_what_cannot_be_done_is_refused_before_a_worker_starts(hf: Path, tmp_path: Path) -> None:
    for main in (evaluate.main, lambda words: generate.main([*words, "--prompt", "a"])):
        with pytest.raises(SystemExit, match="no folder of a run"):
            main([str(tmp_path)])
    with pytest.raises(ConfigError, match="--checkpoint=none: no such checkpoint"):
        commands.config_of("evaluate", hf, tmp_path, [], Path("none"))
    with pytest.raises(ConfigError, match="no such strategy; did you mean single"):
        commands.config_of("evaluate", hf, tmp_path, ["strategy=singel"])
    moved = shutil.copytree(hf, tmp_path / "moved")
    shutil.rmtree(moved / "checkpoints")
    with pytest.raises(SystemExit, match="no whole checkpoint: give one"):
        evaluate.main([str(moved)])
    record.update(moved, overrides=None)
    with pytest.raises(ConfigError, match="can't be changed: leave out strategy=single"):
        commands.config_of("evaluate", moved, tmp_path, ["strategy=single"], hf / "checkpoints" / "last.ckpt")
    with pytest.raises(SystemExit, match="there is no prompt"):
        generate.main([str(hf)])


def test_what_the_run_had_stays_where_it_was(hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the folder from which the command is given, and wherever the run has been moved."""
    run = shutil.copytree(hf, tmp_path / "run")
    own = composed(*record.read(run)["overrides"], "data.path=docs.jsonl")["data"]["path"]
    config = record.read_config(run)
    config["data"]["path"], config["model"]["path"] = own, str(run / "model")
    launch.write(config)
    record.update(run, overrides=[*record.read(run)["overrides"], "data.path=docs.jsonl"])
    shutil.copytree(hf.parent / "model", run / "model")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    changed = commands.config_of("evaluate", run, tmp_path / "out", ["data.batch_size=2"])
    assert (changed["data"]["path"], changed["data"]["batch_size"]) == (own, 2)
    assert changed["model"]["path"] == str(run / "model") and changed["paths"]["output_dir"] == str(tmp_path / "out")


@pytest.mark.parametrize(("word", "said"), [
    *((word, "it changes nothing here") for word in ("callbacks=early_stopping", "hydra.run.dir=x", "+test=true")),
    ("data.context=16,32", "16,32"), ("strategy@foo=single", "foo"), ("data.batch_size=[", "no viable alternative"),
])  # fmt: skip
def test_changes_that_change_nothing_or_that_hydra_does_not_take_are_refused(
    hf: Path, tmp_path: Path, word: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        commands.config_of("evaluate", hf, tmp_path, [word])


# -- recipes.generate ------------------------------------------------------------------------------------------------

PROMPTS = ["The sum of 3 and 4 is", "The product", "The sum of 10 and 11 is 21, and", "It is"]


def written(pool: WorkerPool, run: Path, folder: Path, *layout: str, **more: Any) -> list[str]:
    """The texts that a run's model writes."""
    words = [str(run), *(word for prompt in PROMPTS for word in ("--prompt", prompt)), "--max-new-tokens", "12"]
    given = vars(generate._parser().parse_args(words))
    generation = {"prompts": PROMPTS, **{name: given[name] for name in SETTINGS}, **more}
    done(pool, commands.config_of("generate", run, folder, layout, None, {"generation": generation}))
    lines = [json.loads(line) for line in (folder / TEXTS).read_text().splitlines()]
    assert [line["prompt"] for line in lines] == generation["prompts"]
    return [line["text"] for line in lines]


def test_what_is_drawn_goes_by_the_seed_alone(pool: WorkerPool, hf: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "top_k": 50}
    drawn = written(pool, hf, tmp_path / "a", "strategy=tensor_parallel", **settings)
    assert written(pool, hf, tmp_path / "b", "strategy=single", batch_size=1, **settings) == drawn
    assert written(pool, hf, tmp_path / "c", "strategy=single", seed=1, **settings) != drawn


def test_too_long_a_text_and_a_model_without_texts_are_refused(pool: WorkerPool, hf: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="more than the 64 tokens that the model takes; use at most"):
        written(pool, hf, tmp_path / "texts", "strategy=single", max_new_tokens=60)
    run = trained(pool, tmp_path / "lenet", *SMALL, "model=lenet", "data=digits", "strategy=single")
    with pytest.raises(WorkerError, match="A LeNet writes no text"):
        written(pool, run, tmp_path / "none", "strategy=single")


@pytest.mark.parametrize("config", [
    MixtralConfig(**SIZES, num_local_experts=4, output_router_logits=True),
    GPTNeoConfig(
        vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, window_size=4,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=64,
    ),
    MistralConfig(**SIZES, sliding_window=4),
], ids=lambda config: config.model_type)  # fmt: skip
def test_texts_are_transformers_own_whatever_layers_keep(tmp_path: Path, config: Any) -> None:
    dtype = torch.float32 if config.model_type == "mixtral" else torch.float64  # in which torch has its experts
    module = CausalLM(path=str(model(tmp_path / "model", config)), optimizer={}).to(dtype).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)  # so that not every token is alike
        module.generation = Generation(max_new_tokens=12)
        batch = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "attention_mask": torch.ones(1, 5, dtype=torch.int64)}
        made = module.predict_step({**batch, "prompt_number": torch.tensor([0])}, 0)
        own = module.model.generate(**batch, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
    assert made.tolist() == own[:, 5:].tolist() and len(set(made[0].tolist())) > 2


def chosen(settings: Generation, logits: list[float], number: int = 2000) -> dict[int, float]:
    """How often each token is drawn."""
    prompts = torch.arange(number)
    tokens = settings.choose(torch.tensor(logits).expand(number, -1), prompts, 0)
    return {token: (tokens == token).sum().item() / number for token in range(len(logits))}


def test_the_most_likely_tokens_are_drawn_with_their_probabilities_and_only_of_numbers() -> None:
    logits = [0.0, 2.0, 1.0, -1.0]  # 0.088, 0.64, 0.24, 0.03
    for temperature in (0.5, 1.0, 3.0):
        expected = (torch.tensor(logits) / temperature).softmax(0).tolist()
        found = chosen(Generation(temperature=temperature), logits)
        assert [found[token] for token in range(4)] == pytest.approx(expected, abs=0.04)
    for given, kept in (({}, {1}), ({"top_k": 2}, {1, 2}), ({"top_p": 0.6}, {1}), ({"top_p": 0.9}, {0, 1, 2})):
        settings = Generation(**({"temperature": 1} if given else {}), **given)
        assert {token for token, share in chosen(settings, logits).items() if share} == kept
    with pytest.raises(ValueError, match="not numbers. Some models' are so for padded prompts: use --batch-size 1"):
        Generation().choose(torch.tensor([[0.0, torch.nan]]), torch.tensor([0]), 0)


# -- recipes.check, recipes.plan -------------------------------------------------------------------------------------

DIGITS = ["model=mlp", "data=digits", "trainer.accelerator=cpu", *QUIET]


def test_a_layout_is_equal_to_one_process(pool: WorkerPool, tmp_path: Path) -> None:
    words = [*DIGITS, "strategy=pipeline_zbv", "+command=check", "trainer.precision=64-true"]
    folder = done(pool, composed(*words, folder=tmp_path))
    assert record.read(folder)["status"] == "completed"
    assert 0 <= record.read_metrics(folder)["largest_difference"] < 1e-9  # type: ignore[operator]


@pytest.mark.parametrize(("command", "words", "said"), [
    (check, [], {"command": "check", "precision": "64-true", "schedule": "zbv"}),
    (check, ["trainer.precision=bf16-mixed"], {"command": "check", "precision": "bf16-mixed", "schedule": "zbv"}),
    (plan, ["strategy.microbatches=4", "plan.devices=8"],
     {"command": "plan", "precision": "32-true", "schedule": None, "devices": 8}),
])  # fmt: skip
def test_the_command_line_is_that_of_train(
    monkeypatch: pytest.MonkeyPatch, command: Any, words: list[str], said: dict[str, Any]
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(train, "main", lambda: told.extend(sys.argv))
    monkeypatch.setattr(sys, "argv", ["command.py", "strategy=pipeline_zbv", *words])
    command.main()
    config = composed(*told[1:])
    found = {"command": config["command"], "precision": config["trainer"]["precision"]}
    found |= {"schedule": config["strategy"].get("schedule"), "devices": config["plan"]["devices"]}
    assert found | said == found


def test_the_first_row_is_left_for_the_run(pool: WorkerPool, tmp_path: Path) -> None:
    words = [*DIGITS, "strategy=single", "+command=plan", "plan.devices=2", "plan.memory=1GiB", "plan.device=h100"]
    folder = done(pool, composed(*words, folder=tmp_path))
    said = json.loads((folder / record.PLAN).read_text())
    taken = said["best"]
    assert taken in [row["overrides"] for row in said["rows"]]
    with (folder / "plan.csv").open() as stream:
        records = [*csv.DictReader(stream)]
    assert [record["words"].split() for record in records] == [row["overrides"] for row in said["rows"]]
    assert records[0]["verdict"] == "best" and (folder / "plan.png").exists() == (find_spec("matplotlib") is not None)
    assert "cluster.devices=2" in taken
    assert problems(*DIGITS, *taken) == []
    assert set(record.read_metrics(folder)) == {"seconds_per_step", "bytes"}


@pytest.mark.programs
def test_auto_trains_what_the_plan_takes(tmp_path: Path) -> None:
    words = [*DIGITS, "trainer=smoke", "strategy=auto", "plan.device=h100", "cluster.devices=2"]
    given = [*words, f"hydra.run.dir={tmp_path}/run", f"paths.data_dir={tmp_path}/data"]
    command = [sys.executable, "-m", "recipes.train", *given]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    said = record.read(tmp_path / "run")
    assert said["status"] == "completed" and "strategy=auto" not in said["overrides"]
    taken = [word for word in said["overrides"] if word.startswith("strategy=")]
    assert len(taken) == 1 and taken[0] in ran.stdout
