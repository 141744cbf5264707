"""Which device block holds the KV of which token prefix: chained hash of full blocks -> device block id."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from giveway.core.errors import InvariantError
from giveway.core.ids import DeviceBlockId, TokenId

BlockHash = bytes
ROOT: BlockHash = b"\0" * 16


def root(salt: bytes) -> BlockHash:
    """What a chain of block hashes starts from: ROOT without a salt, else a hash of the salt.

    Chains from different roots never meet, so requests of different salts find none of each other's blocks. The hash
    is personalised: it is another function than the one that `chain` computes, so no choice of tokens and salt makes
    a root equal the hash of a block.
    """
    return blake2b(salt, digest_size=16, person=b"giveway salt").digest() if salt else ROOT


def chain(parent: BlockHash, token_ids: Sequence[TokenId]) -> BlockHash:
    """Hash of one full block given the hash of everything before it. 128 bits, so that a collision does not happen.

    A block's KV depends on all tokens before it, hence the parent. Source: the usual hash chain of paged prefix
    caches; a strong hash because a collision would show one user's text to another.
    """
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


class PrefixIndex:
    """A one-to-one map between hashes and device blocks. It owns nothing: BlockPool knows who holds a block."""

    __slots__ = ("_block_of", "_hash_of")

    def __init__(self) -> None:
        self._block_of: dict[BlockHash, DeviceBlockId] = {}
        self._hash_of: dict[DeviceBlockId, BlockHash] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, block_hash: BlockHash) -> DeviceBlockId | None:
        """Return the block that holds this prefix, or None."""
        return self._block_of.get(block_hash)

    def hash_of(self, block: DeviceBlockId) -> BlockHash | None:
        """Return the prefix that a block holds, or None when it is not findable."""
        return self._hash_of.get(block)

    def put(self, block_hash: BlockHash, block: DeviceBlockId) -> bool:
        """Publish a block. Returns False when another block already holds this prefix: one copy is enough."""
        if block_hash in self._block_of:
            return False
        if block in self._hash_of:
            raise InvariantError(f"block {block} is published under two prefixes")
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        return True

    def drop(self, block: DeviceBlockId) -> None:
        """Forget a block, both ways."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]

    def check(self) -> None:
        """Raise InvariantError unless both directions agree."""
        if {block: block_hash for block_hash, block in self._block_of.items()} != self._hash_of:
            raise InvariantError("the prefix index disagrees with itself")
