"""Reading a verified checkpoint into tensors, however they are cut now: torch reads the overlaps, in several threads.

The headers of all files are read by one process and sent to the others: each opening every file would be the square
of their number on the file system.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

from llama3.parallel.mesh import World
from llama3.train.agree import led


class Reader(HuggingFaceStorageReader):
    """torch's reader of safetensors files, told what is in them."""

    def __init__(self, folder: Path, threads: int) -> None:
        super().__init__(str(folder), threads)
        self.known = Metadata({})

    def read_metadata(self) -> Metadata:
        return self.known


def load(folder: Path, tensors: dict[str, Tensor], world: World, threads: int) -> None:
    """Fill `tensors` in place from the files of `folder`; every process calls it.

    Raises CheckpointException if a tensor is missing or has another shape.
    """
    reader = Reader(folder, threads)
    reader.known = led(world, super(Reader, reader).read_metadata)
    torch_load(dict(tensors), storage_reader=reader, no_dist=world.size == 1)
