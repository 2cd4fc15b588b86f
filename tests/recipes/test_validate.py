"""recipes/validate.py: what is refused, with setting, value and fix, all at once; classes that can not be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra.utils import get_class

from lightning_parallel.cuts.search import partition
from recipes import ROOT
from recipes.examples import MODELS
from recipes.problem import ConfigError
from recipes.validate import validate
from tests.recipes.runs import composed, problems, refused

HERE = "tests.recipes.test_validate"
OTHER = "+callbacks.x._target_=lightning.pytorch.callbacks"
OWN = "lightning.pytorch.demos.boring_classes.BoringModel"


OF_NO_KIND = {
    "strategy=pipeline_gpipe": {
        "strategy.schedule=gpip": "naive or gpipe or 1f1b",
        "strategy.microbatches=0": "an integer of at least 1, or auto",
        "strategy.process_group_backend=foo": "gloo or nccl, or null",
        "optimizer.lr=fast": "a number of at least 0",
        "model.dropout=1.5": "from 0 to 1",
        "trainer.precision=bf17": "bf16-mixed",
        "cluster.devices=0": "at least 1",
        "test=perhaps": "true or false",
        "plan.devices=0": "at least 1",
        "plan.memory=2apples": "",
        "plan.device=abacus": "",
        "seed=-1": "at least 0",
    },
    "experiment=async_quality": {
        "strategy.correction=second_ordr": "error_feedback or second_order, or a number of at least 0, or null",
        "strategy.weights=stsh": "stash or 2bw or latest",
    },
}


@pytest.mark.parametrize("chosen", OF_NO_KIND)
def test_values_of_the_wrong_kind_are_refused_with_what_they_can_be(chosen: str) -> None:
    wrong = OF_NO_KIND[chosen]
    found = {str(problem).lower().partition(":")[0]: problem.fix for problem in problems(chosen, *wrong)}
    assert found.keys() == wrong.keys()
    assert [override for override, said in wrong.items() if said not in found[override]] == []


CONTAINER = ["cluster=slurm", "cluster.container=an/image"]
MLP = ["model=mlp", "data=digits", "model.layers=3", "strategy=pipeline_1f1b", "cluster.oversubscribe=true"]


@pytest.mark.parametrize(("overrides", "path", "said"), [
    (["model=lenet"], "model.name", "use data=digits"),
    (["model=gpt", "data=digits"], "model.name", "use data=stdlib or data=text"),
    (["model.heads=3"], "model.heads", "does not divide model.width=128"),
    (["model.context=64"], "model.context", "data.context=128"),
    (["model=lenet", "data=digits", "model.size=10"], "model.size", "multiple of 4"),
    (["strategy=ddp", "cluster.devices=5"], "data.batch_size", "a multiple of 5"),
    (["strategy=single", "timeline=true"], "timeline", "use a pipeline strategy"),
    (["strategy=pipeline_tensor", "compile=true"], "compile", "use a pipeline, ddp or single"),
    (["strategy=fully_sharded", "compile=true"], "compile", "use a pipeline, ddp or single"),
    (["strategy.data_parallel_kind=fully_shard", "compile=true"], "compile", "use a pipeline, ddp or single"),
    (["strategy=data_parallel", "compile=true"], "compile", "use a pipeline, ddp or single"),
    (["strategy.stages=3"], "strategy.stages", "set cluster.devices=3"),
    (MLP + ["cluster.devices=5"], "strategy.stages", "5 stages, but model=mlp can be cut into 4 at most"),
    (["model=custom", "data=digits"], "model._target_", "not a class; name your own"),
    (["strategy=pipeline_tensor", "cluster.devices=5"], "strategy.tensor_parallel", "does not fill"),
    (["strategy.stages=2", "strategy.data_parallel=2"], "strategy.stages", "set cluster.devices=4"),
    (["strategy.tensor_parallel=auto"], "strategy.stages and strategy.tensor_parallel", "give one a number"),
    (["strategy.microbatches=25"], "strategy.microbatches", "at most 24"),
    (["strategy=pipeline_naive", "strategy.microbatches=8"], "strategy.microbatches", "use '1f1b' for more"),
    (["scheduler=cosine", "trainer.max_steps=20"], "scheduler.warmup_steps", "use 4, a fifth"),
    (["ckpt_path=/no/such.ckpt"], "ckpt_path", "no such checkpoint"),
    (["ckpt_path=last"], "ckpt_path", "or use resume=auto"),
    (["init_from=pyproject.toml"], "init_from", "no checkpoint, or only a part of one"),
    (["init_from=a.ckpt", "ckpt_path=b.ckpt"], "init_from", "ckpt_path=b.ckpt brings its own weights"),
    (["resume=newest"], "resume", "give auto"),
    (["resume=auto", f"{OTHER}.ModelCheckpoint"], "callbacks.x.dirpath", "where it saves depends on the logger"),
    (["scheduler=cosine", "trainer.max_steps=-1"], "scheduler.total_steps", "trainer.max_steps"),
    (["+trainer.devices=4"], "trainer.devices", "use cluster.devices"),
    (["model.name=gtp"], "model.name", "did you mean gpt?"),
    (["+callbacks.mine=3"], "callbacks.mine", "_target_"),
    ([f"+model._target_={OWN}", "data=digits"], "model._target_", f"use model=custom model._target_={OWN}"),
    (["+optimizer.eps=1e-6", "optimizer=muon"], "optimizer.eps", "no such key in optimizer"),
    (["optimizer._target_=null"], "optimizer._target_", "torch.optim.AdamW"),
    (["cluster=slurm", "cluster.mounts=[/data:/data]", "launch=false"], "cluster.mounts", "there is no container"),
    ([*CONTAINER, "cluster.mounts=['/a:/a,/b:/b']", "launch=false"], "cluster.mounts", ""),
    (["cluster=kubernetes", "cluster.image=null", "cluster.claim=runs"], "cluster.image", "give a string"),
    (["cluster=kubernetes", "cluster.image=me/image:1", "cluster.claim=null"], "cluster.claim", "give a string"),
    (["model=hf", "model.path=null"], "model.path", "names no folder"),
    (["model=hf", "model.path=/nowhere"], "model.path", "no such folder"),
    (["model=hf", f"model.path={ROOT}"], "model.path", "has no config.json"),
])  # fmt: skip
def test_values_that_do_not_go_together_are_refused_with_the_fix(overrides: list[str], path: str, said: str) -> None:
    told = refused(*overrides)
    assert told.startswith(f"{path}=") and said in told


def test_a_text_file_that_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    for path, said in (("null", "no file is given"), (tmp_path / "none", "no such file"), (tmp_path, "not a file"),
                       (empty, "the file is empty")):  # fmt: skip
        assert refused("data=text", f"data.path={path}").startswith(f"data.path={path}: {said}")


def test_values_and_rules_are_told_together_but_no_rule_by_a_wrong_value() -> None:
    found = problems("optimizer.lr=-1", "model.heads=3", "data.batch_size=none", "strategy=ddp", "cluster.devices=5")
    assert [problem.path for problem in found] == ["data.batch_size", "optimizer.lr", "model.heads"]  # type: ignore[union-attr]
    message = str(ConfigError(found))
    assert message.startswith("3 problems in the config, nothing was started:")
    assert all(str(problem) in message for problem in found)


@pytest.mark.parametrize(
    ("model", "options"),
    [("gpt", {"layers": 2}), ("gpt", {"layers": 1, "width": 16}), ("mlp", {"layers": 2}), ("lenet", {})],
)
def test_no_partition_has_more_stages(model: str, options: dict[str, int]) -> None:
    module = get_class(MODELS[model].target)(optimizer={"_target_": "torch.optim.SGD", "lr": 0.1}, **options)
    module.log = lambda *args, **kwargs: None
    tokens, images = torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 1, 8, 8)
    batch = (tokens, tokens) if model == "gpt" else (images, torch.zeros(2, dtype=torch.long))
    most_stages = MODELS[model].most_stages
    assert most_stages is not None
    most = most_stages(options.get("layers", 0))
    with pytest.raises(ValueError, match="stages"):
        partition(module, lambda: module.training_step(batch, 0), most + 1)
    if model != "gpt":  # whose layers are opened by their sizes
        partition(module, lambda: module.training_step(batch, 0), most)


def test_names_of_classes_of_the_users_own_are_not_those_of_examples() -> None:
    config = composed("strategy=pipeline_gpipe")
    config["model"] = {"_target_": f"{HERE}.Mine", "width": 3, "name": "gpt"}
    config["data"] = {"_target_": f"{HERE}.make_data", "size": 5, "name": "text", "batch_size": "auto"}
    config["scheduler"] = {"_target_": "transformers.get_scheduler", "name": "cosine", "num_warmup_steps": 3}
    told = [str(problem) for problem in validate(config)]
    assert all(HERE in problem for problem in told), told  # of arguments alone


class Mine(L.LightningModule):
    def __init__(self, width: int, optimizer: Any = None) -> None:
        super().__init__()


class MyData(L.LightningDataModule): ...


class MyOptimizer(torch.optim.SGD): ...


def make_data(size: int) -> MyData:
    return MyData()


NOT_A_CLASS = 3


@pytest.mark.parametrize(("overrides", "said"), [
    (["optimizer._target_=torch.optim.AdamV"], "optimizer._target_=torch.optim.AdamV: torch.optim has no AdamV; "),
    (["optimizer._target_=trch.optim.Adam"], "there is no module trch"),
    (["optimizer._target_=torch.nn.Linear"], "not what optimizer needs; name a subclass of torch's Optimizer"),
    (["optimizer._target_=torch.optim.Adagrad", "~optimizer.betas", "+optimizer.eps_=1"], "eps_=1: no argument"),
    (["+model._target_=torch.nn.Linear"], "name a subclass of lightning's LightningModule"),
    ([f"+model._target_={HERE}.NOT_A_CLASS"], "not a class"),
    ([f"{OTHER}.EarlyStoping"], "did you mean EarlyStopping?"),
    ([f"{OTHER}.EarlyStopping"], "callbacks.x.monitor=: lightning.p"),
    (["+callbacks.checkpoint.save_tops=1"], "callbacks.checkpoint.save_tops=1: no argument of lightning"),
    (["logger.csv._target_=lightning.pytorch.callbacks.EarlyStopping"], "name a subclass of lightning's Logger"),
    (["+scheduler._target_=torch.optim.lr_scheduler.StepLR"], "know schedules by their names"),
    (["cluster._target_=my.Cluster"], "there is no module my"),
    (["strategy=ddp", "strategy.timeout={_target_: datetime.timedeltas, minutes: 1}"], "did you mean timedelta?"),
    (
        ["+callbacks.x={_target_: lightning.pytorch.Callback, sub: [{_target_: no.such.Thing}]}"],
        "there is no module no",
    ),
])  # fmt: skip
def test_a_class_that_cannot_be_made_is_told_with_what_is_wrong(overrides: list[str], said: str) -> None:
    found = problems(*overrides)
    assert sum(said in str(problem) for problem in found) == 1, found
    assert all("\n" not in str(problem) for problem in found)


def test_a_module_that_breaks_when_it_is_imported_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_written.py").write_text("import a_package_that_there_is_not\n")
    (tmp_path / "wrong_syntax.py").write_text("class Model(\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plain = ["~model.name"]
    (problem,) = [p for p in problems("+model._target_=half_written.Model", *plain) if "_target_" in str(p)]
    assert "there is no module a_package_that_there_is_not" in str(problem)
    (problem,) = [p for p in problems("+model._target_=wrong_syntax.Model", *plain) if "_target_" in str(p)]
    assert "can't be imported: SyntaxError" in str(problem)


def own(*overrides: str) -> list[Any]:
    """With a model of the user's own."""
    keys = ["context", "layers", "heads", "vocab_size", "dropout", "tie_embeddings", "name"]
    return problems(f"+model._target_={HERE}.Mine", *(f"~model.{key}" for key in keys), *overrides)


def test_classes_of_the_users_own_are_checked_by_their_signatures_and_a_function_may_make_the_data() -> None:
    assert own("+model.optimizer=${optimizer}") == []
    (problem,) = own("+model.widht=3")
    assert "did you mean width?" in str(problem)
    (problem,) = own("~model.width")
    assert str(problem).startswith(f"model.width=: {HERE}.Mine needs it; set +model.width=VALUE")
    # Such a model does with the optimizer's and the scheduler's node as it likes, as long as the class is there.
    assert own("optimizer._target_=torch.optim.SGD", "+optimizer.mine=3") != []  # a kind that is known
    assert own(f"optimizer._target_={HERE}.MyOptimizer", "+optimizer.mine=3") == []
    (problem,) = own("optimizer._target_=my.Optimizer")
    assert "there is no module my" in str(problem)
    keys = ["name", "directory", "context", "val_windows", "batch_size", "workers"]
    without = [f"~data.{key}" for key in keys]
    assert problems(f"+data._target_={HERE}.make_data", "+data.size=3", *without) == []
    assert refused(f"+data._target_={HERE}.make_data", *without).startswith("data.size=: ")
