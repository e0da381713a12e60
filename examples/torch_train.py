"""Train a PyTorch module under a plan, on all processes that torchrun starts:

torchrun --nproc-per-node 4 examples/torch_train.py --steps 20
torchrun --nproc-per-node 4 examples/torch_train.py --pipeline 2    # in two stages, each on two processes

On GPUs the backend is NCCL, else Gloo. Every process builds the model; rank 0's weights hold.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn

import pase


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, layers: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def examples(seed: int, count: int, width: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, of which the largest of the first coordinates says the class; equal on every rank."""
    points = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return points, points[:, :classes].argmax(1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--mesh", help="4, 2x2, …; by default the cheapest that fits")
    options.add_argument("--pipeline", default="none", help="the number of stages; by default there are none")
    given = options.parse_args()

    gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpus else "gloo")
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()

    module = Classifier(layers=4, width=32, hidden=128, classes=8).to("cuda" if gpus else "cpu")
    batch = examples(0, 64, 32, 8)
    plan = pase.compile(
        module,
        *batch,
        devices=world,
        mesh=given.mesh,
        pipeline=given.pipeline,
        loss=lambda m, x, y: m(x, y),
    )
    if rank == 0:
        print(plan)

    step = plan.torch.parallelize(module)  # parameters are DTensors now; those of other stages are None
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for i in range(given.steps):
        loss = step.backward(*examples(i, 64, 32, 8))  # a rank takes its part of the batch
        norm = step.clip_grad_norm_(1.0)  # of all gradients, other stages' too
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {i} norm {norm.item():.6f} loss {loss.item():.6f}")

    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    checkpoint.save(module.state_dict(), checkpoint_id=folder[0])  # each rank writes its part
    checkpoint.load(module.state_dict(), checkpoint_id=folder[0])
    first = module.layers[0].up.weight
    whole = None if first is None else first.full_tensor().detach()
    if rank == 0:
        print(f"saved and loaded; norm of the first weight {whole.norm().item():.6f}")
    dist.barrier()  # no rank closes its connections while another still uses them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
