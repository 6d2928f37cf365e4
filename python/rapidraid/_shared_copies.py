"""Copies of a state for ``dcp.async_save``, in memory that another process can map.

The tensors of a copy lie in a few memory files. If DCP saves in a process of its own, the copy travels to it as the
descriptors of these files and a pickle in which each tensor is a place in one of them, so no byte is copied again. torch
would send a descriptor for each tensor, and a state often has more tensors than a process can have descriptors.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import weakref
from collections.abc import Mapping
from multiprocessing import reduction
from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

#: Each storage of a copy begins at a multiple of this.
ALIGNMENT = 64
#: The length of the shortest file, in bytes. Pages that no storage uses take no memory.
MIN_FILE_BYTES = 16 << 20

#: The place of a storage: the number of the file, the offset, and the length in bytes.
StoragePlace = tuple[int, int, int]


class _MemoryFile:
    """A memory file without a name, which is mapped as long as a tensor uses it.

    Args:
        length: The length in bytes.
        descriptor: An open descriptor of the file, which this object closes. Default: a new file is made.

    """

    def __init__(self, length: int, descriptor: int | None = None) -> None:
        self.length = length
        if descriptor is None:
            descriptor = os.memfd_create("rapidraid-copy")
            os.ftruncate(descriptor, length)
        weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        self._storage = torch.frombuffer(mmap.mmap(descriptor, length), dtype=torch.uint8).untyped_storage()

    def slice(self, offset: int, length: int) -> torch.UntypedStorage:
        """Returns a part of the file as a storage. The storage keeps the mapping."""
        found: torch.UntypedStorage = self._storage[offset : offset + length]
        return found

    def find(self, address: int) -> int | None:
        """Returns the offset of an address, or ``None`` if it lies elsewhere."""
        offset = address - self._storage.data_ptr()
        return offset if 0 <= offset < self.length else None


class SharedStager(StateDictStager):
    """Copies states into memory files. Each copy overwrites the one before."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[_MemoryFile] = []
        #: The file in which the next storage is placed, and its offset there.
        self._next = (0, 0)
        #: The storages that were copied, by device, address and length. In torch 2.9 the base class asks for a copy
        #: of a storage again for each tensor that shares it.
        self._copied: dict[tuple[torch.device, int, int], torch.UntypedStorage] = {}

    def copy(self, state: Mapping[str, Any]) -> SharedCopy:
        """Returns a copy of a state, on the CPU."""
        self._next = (0, 0)
        try:
            staged = self.stage(dict(state))
        finally:
            self._copied.clear()
        # A state that has become much smaller gives memory back.
        del self._files[self._next[0] + 1 :]
        return SharedCopy(staged, self._files)

    def close(self) -> None:
        """Forgets the files. Copies that are in use keep theirs."""
        super().close()  # type: ignore[no-untyped-call]
        # Not every release of torch clears these functions. They refer to the stager, so only a garbage collection would free it.
        self._deepcopy_dispatch.clear()
        self._files = []

    def deepcopy_with_tensor_offload(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Copies an object and what it refers to. torch would lose the bits that make a view conjugated or negated."""
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and (x.is_conj() or x.is_neg()):
            x = x.resolve_conj().resolve_neg()
        return super().deepcopy_with_tensor_offload(x, *args, **kwargs)  # type: ignore[no-untyped-call]

    def _stage_untyped_storage(self, storage: torch.UntypedStorage, non_blocking: bool = False) -> torch.UntypedStorage:
        key = (storage.device, storage.data_ptr(), storage.nbytes())
        if key not in self._copied:
            to = self._allocate(storage.nbytes())
            to.copy_(storage, non_blocking)
            self._copied[key] = to
        return self._copied[key]

    def _allocate(self, length: int) -> torch.UntypedStorage:
        number, offset = self._next
        while number < len(self._files) and offset + length > self._files[number].length:
            number, offset = number + 1, 0
        if number == len(self._files):
            # A large state has few files, because each is twice as long as the one before.
            longest = self._files[-1].length if self._files else MIN_FILE_BYTES // 2
            self._files.append(_MemoryFile(max(longest * 2, _round_up(length, mmap.PAGESIZE))))
        self._next = (number, _round_up(offset + length, ALIGNMENT))
        return self._files[number].slice(offset, length)


class SharedCopy(dict[str, Any]):
    """A copy of a state. In another process it is a plain dict over the same memory."""

    def __init__(self, state: Mapping[str, Any], files: list[_MemoryFile]) -> None:
        super().__init__(state)
        self._files = list(files)

    def __reduce__(self) -> tuple[Any, ...]:
        packed = io.BytesIO()
        _Packer(packed, self._files).dump(dict(self))
        sent = [(file.length, reduction.DupFd(file.descriptor)) for file in self._files]
        return _receive, (packed.getvalue(), sent)


class _Packer(pickle.Pickler):
    """Pickles a state. Storages that lie in the files are pickled as their places."""

    def __init__(self, to: io.BytesIO, files: list[_MemoryFile]) -> None:
        super().__init__(to, pickle.HIGHEST_PROTOCOL)
        self._files = files

    def persistent_id(self, obj: Any) -> tuple[StoragePlace, torch.dtype] | None:
        is_typed = isinstance(obj, torch.storage.TypedStorage)
        if not is_typed and not isinstance(obj, torch.UntypedStorage):
            return None
        place = self._place_of(obj._untyped_storage if is_typed else obj)
        return None if place is None else (place, obj.dtype if is_typed else torch.uint8)

    def _place_of(self, storage: torch.UntypedStorage) -> StoragePlace | None:
        for number, file in enumerate(self._files):
            offset = file.find(storage.data_ptr())
            if offset is not None:
                return number, offset, storage.nbytes()
        return None


class _Unpacker(pickle.Unpickler):
    """Unpickles a state over the same files."""

    def __init__(self, packed: bytes, files: list[_MemoryFile]) -> None:
        super().__init__(io.BytesIO(packed))
        self._files = files

    def persistent_load(self, pid: tuple[StoragePlace, torch.dtype]) -> torch.storage.TypedStorage:
        (number, offset, length), dtype = pid
        # The functions that make tensors from pickles expect a typed storage, of whatever type.
        storage = self._files[number].slice(offset, length)
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _receive(packed: bytes, sent: list[tuple[int, Any]]) -> dict[str, Any]:
    files = [_MemoryFile(length, descriptor.detach()) for length, descriptor in sent]
    found: dict[str, Any] = _Unpacker(packed, files).load()
    return found


def _round_up(length: int, unit: int) -> int:
    return -(-length // unit) * unit
