"""One rank's process: joins the process group, builds the engine, and applies calls to its machine. Knows nothing of Ray."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

COLLECTIVE_TIMEOUT_S = 120  # a rank that waits longer for another one gives up with an error instead of hanging


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Rank:
    """`config`: a `GroupConfig`. `address`, `port`: where rank 0 listens for the process group."""

    def __init__(self, config: object, rank: int, address: str, port: int, root: str) -> None:
        from workers.group_config import GroupConfig

        assert isinstance(config, GroupConfig)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch

        from workers.megatron import cpu

        on_cpu = cpu.install()
        torch.set_num_threads(config.threads_per_rank)
        device = torch.device("cpu") if on_cpu else torch.device("cuda", rank % torch.cuda.device_count())
        if not on_cpu:
            torch.cuda.set_device(device)
            torch.use_deterministic_algorithms(True, warn_only=True)
        self._join(config, rank, address, port, on_cpu)

        from workers.machine import Machine
        from workers.megatron.beside_engine import BesideEngine
        from workers.megatron.engine import MegatronEngine

        self.machine = Machine((BesideEngine if config.engine else MegatronEngine)(config, Path(root), device))

    @staticmethod
    def _join(config: object, rank: int, address: str, port: int, on_cpu: bool) -> None:
        import torch.distributed as dist
        from megatron.core import parallel_state, tensor_parallel

        from workers.group_config import GroupConfig

        assert isinstance(config, GroupConfig)
        dist.init_process_group(
            "gloo" if on_cpu else "nccl",
            init_method=f"tcp://{address}:{port}",
            rank=rank,
            world_size=config.tp * config.dp,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=config.tp)
        tensor_parallel.model_parallel_cuda_manual_seed(config.model.seed + 1)

    @staticmethod
    def leave() -> None:
        """Ends the process group, so that this process can host another rank."""
        import torch.distributed as dist
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
