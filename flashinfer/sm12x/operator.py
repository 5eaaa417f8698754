# SPDX-License-Identifier: Apache-2.0
"""A call as one tuple of its arguments, and the opaque operator that ``torch.compile`` and other tracers see in its
place.

The fields of a call's type are the operator's schema, and code that handles a call reads its arguments by these names.
The public function spells out each field, because Dynamo of torch 2.11 cannot trace ``locals()``.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .checks import is_traced

_Call = TypeVar("_Call", bound=NamedTuple)


def define(
    name: str,
    call: type,
    run: Callable[[Any], Any],
    fake: Callable[[Any], Any] | None = None,
    mutates: Sequence[str] = (),
) -> Callable[..., Any]:
    """Register ``flashinfer::name``, whose arguments are the fields of the named tuple ``call``.

    Parameters
    ----------
    name : str
        The operator's name.
    call : type
        A ``NamedTuple`` of types that torch's schemas know.
    run : callable
        Computes a ``call``; what it returns may share no memory with an argument.
    fake : callable, optional
        Returns the outputs' metadata for tracers, without computing; by default nothing is returned.
    mutates : sequence of str
        Fields that ``run`` writes.

    Returns
    -------
    callable
        Calls the operator with a ``call``, so that modes and subclasses of tensors see it.
    """
    fields, returned = typing.get_type_hints(call), typing.get_type_hints(run)["return"]

    def computed(*arguments: Any) -> Any:
        return run(call(*arguments))

    computed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(field, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind)
            for field, kind in fields.items()
        ],
        return_annotation=None if returned is type(None) else returned,
    )
    registered = torch.library.custom_op(f"flashinfer::{name}", computed, mutates_args=tuple(mutates))
    registered.register_fake(lambda *arguments: None if fake is None else fake(call(*arguments)))
    traced = getattr(torch.ops.flashinfer, name)
    return lambda arguments: traced(*arguments)


class OutputOperator(Generic[_Call]):
    """An operator that writes its output into the call's memory, or into new memory if the call has none, and returns
    it.

    Parameters
    ----------
    name, call
        The same as in :func:`define`.
    validate : callable
        Checks a call before any launch.
    compute : callable
        Computes a valid call that has its output, given what ``validate`` gave.
    new_output : callable
        Memory for the output of a call that is valid or traced.
    mutates : sequence of str
        Fields that ``compute`` writes, the output's first.
    """

    def __init__(
        self,
        name: str,
        call: type[_Call],
        validate: Callable[[_Call], Any],
        compute: Callable[[_Call, Any], None],
        new_output: Callable[[_Call], torch.Tensor],
        mutates: Sequence[str],
    ) -> None:
        self.validate, self.compute, self.new_output = validate, compute, new_output
        self.output = call._fields.index(mutates[0])

        def run(call: _Call) -> None:
            compute(call, validate(call))

        self.traced = define(name, call, run, mutates=mutates)

    def __call__(self, call: _Call) -> torch.Tensor:
        traced = is_traced(call)
        checked = None if traced else self.validate(call)
        output: torch.Tensor | None = call[self.output]
        if output is None:
            output = self.new_output(call)
            call = call._make((*call[: self.output], output, *call[self.output + 1 :]))
        if traced:
            self.traced(call)
        else:
            self.compute(call, checked)
        return output
