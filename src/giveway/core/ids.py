"""Identifiers. Each tier of blocks has a type of its own: a host block can never be passed for a device block."""

from typing import NewType

RequestId = NewType("RequestId", str)
DeviceBlockId = NewType("DeviceBlockId", int)
HostBlockId = NewType("HostBlockId", int)
DiskBlockId = NewType("DiskBlockId", int)
CopyId = NewType("CopyId", int)

# A plain alias: token ids cross every border (tokenizer, sampler, JSON) by the thousand, and nothing else here is
# an int in [0, vocabulary), so a distinct type would only add casts.
TokenId = int

BlockTable = tuple[DeviceBlockId, ...]
"""Device blocks of one request in logical order; replaced as a whole when it grows, so a reference is a snapshot."""
