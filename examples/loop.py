import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_parallel.cuts.search import partition
from lightning_parallel.losses.normaliser import BatchLoss
from lightning_parallel.pipeline.chunk import Microbatch
from lightning_parallel.pipeline.engine import Engine
from lightning_parallel.pipeline.stage import Stage
from lightning_parallel.ranks.groups import Groups
from lightning_parallel.ranks.layout import Layout
from lightning_parallel.schedules.named import SCHEDULES

dist.init_process_group("gloo")
cpu = torch.device("cpu")
torch.manual_seed(1)  # the same model, and the same batches, on every rank
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)], nn.Linear(64, 10))
x = torch.randn(64, 64)
y = x[:, :10].argmax(1)
microbatches = list(zip(x.split(16), y.split(16), strict=True))


def step(x, y):  # any function of a batch that returns a loss
    return cross_entropy(model(x), y)


layout = Layout.resolve(dist.get_world_size(), dist.get_rank(), pipeline="auto")
cut = partition(model, lambda: step(*microbatches[0]), layout.stages)
stage = Stage(model, cut, layout.stage, cpu)  # from here on the layers of other stages are absent
stage.install()
stage.flow = stage.flow_of(lambda: step(*microbatches[0]))
engine = Engine(stage, layout, Groups(layout).wires(cut.placement), cpu, loss_of=lambda loss: loss)
optimizer = torch.optim.AdamW(stage.named_parameters().values(), lr=0.001)
actions = SCHEDULES["1f1b"](layout.stages, len(microbatches))[layout.stage]  # this stage's list

for update in range(20):
    loss = BatchLoss([len(y) for _, y in microbatches])
    work = {}
    for k, (part_x, part_y) in enumerate(microbatches):
        run = lambda part_x=part_x, part_y=part_y: step(part_x, part_y)  # noqa: E731
        work[k] = Microbatch(run, 1.0, loss, index=k, seed=k, ends_batch=k == len(microbatches) - 1)
    losses = engine.run(actions, work)  # what the step returned for each, on the last stage
    for parameter in stage.named_parameters().values():
        parameter.grad *= loss.factor
    optimizer.step()
    optimizer.zero_grad()
    if losses and update % 5 == 4:
        print(f"update {update}: loss {sum(each.item() for each in losses) / len(losses):.6f}")
dist.destroy_process_group()
