"""The hash that devices compute of weights."""

import pytest
import torch

from gradlane.feed import device_hash
from gradlane.feed.device_hash import device_hash as hash_of

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_change_of_one_element_shows(dtype):
    tensor = torch.arange(300).remainder(2).to(dtype).view(20, 15)
    hashes = {int(hash_of(tensor))}
    for index in range(300):
        other = tensor.clone()
        other.view(-1)[index] = 1 - other.view(-1)[index].to(torch.int64)
        hashes.add(int(hash_of(other)))
    assert len(hashes) == 301


def test_order_size_and_sign_count():
    given = torch.arange(6.0)
    others = (given.flip(0), given[:5], torch.cat([given, torch.zeros(1)]), -given, given.roll(1))
    assert len({int(hash_of(tensor)) for tensor in (given, *others)}) == 6
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0]))


def test_chunks_and_strides_do_not_count(monkeypatch):
    given = torch.randn(30, 40)
    whole = hash_of(given)
    monkeypatch.setattr(device_hash, "CHUNK", 7)
    assert hash_of(given) == whole
    assert hash_of(given.T.contiguous().T) == whole
