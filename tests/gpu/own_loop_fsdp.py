"""A training loop that its user has written: FSDP2, an optimizer that counts steps on the CPU, an average of weights."""

import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import elastictrain

folder, steps, recoverable = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 4
device = elastictrain.init_process_group(
    folder,
    recoverable=recoverable,
    checkpoint={"every_steps": 40, "memory_dir": sys.argv[3]},
    preflight={"level": "off"},
    run={"deterministic": True},
    telemetry={"flush_s": 0.1},
)
torch.manual_seed(0)
inputs = torch.randn(256, 64)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(64, 512), nn.Dropout(0.1), nn.ReLU(), nn.Linear(512, 1)).to(device)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
fully_shard(model)
fully_shard(average.module)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
assert device.type == "cuda"


def train(run: elastictrain.Run) -> None:
    first = run.restore() + 1
    order = elastictrain.SampleOrder(len(dataset), global_batch=32, first_step=first)
    for step, (x, y) in zip(range(first, steps + 1), DataLoader(dataset, batch_sampler=order), strict=False):
        loss = (model(x.to(device)) - y.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        run.step_done(step, metrics={"loss": loss})
        torch.cuda._sleep(40_000_000)  # about 20 ms
        if run.should_stop:
            break


with elastictrain.attach(folder, model=model, optimizer=optimizer, extra={"average": average}) as run:
    (elastictrain.recoverable(train) if recoverable else train)(run)
assert optimizer.state[next(iter(model.parameters()))]["step"].device.type == "cpu"
