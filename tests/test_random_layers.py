"""Layers drawn at random: the same for a seed everywhere, legal, of the work that is promised, and of every kind."""

from __future__ import annotations

import hashlib

import pytest

from polyphase.bench.layers import NamedLayer, parse_layer
from polyphase.bench.random_layers import (
    BYTES_PER_SECOND,
    FLOPS_PER_SECOND,
    LEAST_SECONDS,
    MOST_SECONDS,
    random_layers,
)


@pytest.fixture(scope="module")
def layers() -> list[NamedLayer]:
    return random_layers(300, 0)


def test_a_seed_gives_the_same_layers_everywhere(layers: list[NamedLayer]) -> None:
    """If this fails, records of random layers are no longer comparable: change the generator knowingly."""
    text = "\n".join(layer.name for layer in layers)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "22a8ba714dbe0915"


def test_fewer_layers_are_the_first(layers: list[NamedLayer]) -> None:
    assert random_layers(20, 0) == layers[:20]
    assert random_layers(20, 1) != layers[:20]


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_dimensions_can_be_chosen(dims: int) -> None:
    assert {layer.problem.dims for layer in random_layers(30, 7, dims)} == {dims}


def test_a_name_is_the_layer(layers: list[NamedLayer]) -> None:
    assert all(parse_layer(layer.name) == layer.problem for layer in layers)
    assert len({layer.name for layer in layers}) == len(layers)


def test_the_work_is_what_is_promised(layers: list[NamedLayer]) -> None:
    floors = [layer.problem.floor_seconds(BYTES_PER_SECOND, FLOPS_PER_SECOND) for layer in layers]
    assert LEAST_SECONDS <= min(floors) < 2 * LEAST_SECONDS
    assert MOST_SECONDS / 2 < max(floors) <= MOST_SECONDS


def test_there_are_layers_of_every_kind(layers: list[NamedLayer]) -> None:
    problems = [layer.problem for layer in layers]
    shares = {
        "one dimension": sum(p.dims == 1 for p in problems),
        "three dimensions": sum(p.dims == 3 for p in problems),
        "groups": sum(1 < p.groups < p.in_channels for p in problems),
        "depthwise": sum(p.groups == p.in_channels > 1 for p in problems),
        "one image": sum(p.batch == 1 for p in problems),
        "few input channels": sum(p.in_channels_per_group <= 8 and p.groups == 1 for p in problems),
        "few output channels": sum(p.out_channels_per_group <= 8 and p.groups == 1 for p in problems),
        "odd channels": sum(p.in_channels_per_group % 8 != 0 and p.groups == 1 for p in problems),
        "odd widths": sum(p.input_size[-1] % 2 for p in problems),
        "output padding": sum(any(p.output_padding) for p in problems),
        "dilation": sum(set(p.dilation) != {1} for p in problems),
        "stride 1": sum(set(p.stride) == {1} for p in problems),
        "kernel is stride": sum(p.kernel_size == p.stride for p in problems),
        "uneven kernels": sum(len(set(p.kernel_size)) > 1 for p in problems),
        "long kernels": sum(max(p.kernel_size) >= 64 for p in problems),
    }
    assert min(shares.values()) >= 0.01 * len(problems), shares
