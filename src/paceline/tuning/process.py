"""What of a way to compute belongs to the whole process: its threads, and what its heap keeps."""

import torch

from . import allocator


class kept_process:
    """Leave threads and heap of the block's surroundings as they were."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        self._is_kept = allocator.is_kept()

    def __exit__(self, *_: object) -> None:
        allocator.restore(self._is_kept)
        torch.set_num_threads(self._threads)
