"""The tree in the docstring of `errors` is the tree in the code."""

import re

import grpc
from headrace_shard import errors
from headrace_shard.errors import ShardError


def descendants(root: type[ShardError]) -> list[type[ShardError]]:
    return [each for child in root.__subclasses__() for each in (child, *descendants(child))]


def test_docstring_lists_every_error_with_its_status() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+) +([A-Z_]+ )?", errors.__doc__ or ""))
    classes = {
        error.__name__: error for error in descendants(ShardError) if error.__module__ == errors.__name__
    }
    assert set(drawn) == set(classes)
    for name, status in drawn.items():
        if status:
            assert classes[name].status == getattr(grpc.StatusCode, status.strip())


def test_what_ends_a_start_is_no_fault_of_a_step() -> None:
    assert all(error.status == errors.StartError.status for error in descendants(errors.StartError))
