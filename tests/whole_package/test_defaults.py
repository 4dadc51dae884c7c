# SPDX-License-Identifier: Apache-2.0
"""Arguments of the same name have the same default everywhere."""

import importlib
import inspect
import pkgutil

import pytest

import pyro_dvi

FITS = {"fit", "tune", "train_ensemble"}  # the same call gives the same posterior
MODULES = [
    importlib.import_module(info.name)
    for info in pkgutil.walk_packages(pyro_dvi.__path__, "pyro_dvi.")
    if not info.name.endswith("_kernel")  # needs Triton
]


def public(argument):
    """Public functions and methods with an argument, and its description."""
    found = {}
    for module in MODULES:
        for thing in (getattr(module, name) for name in getattr(module, "__all__", ())):
            members = (
                inspect.getmembers(thing, inspect.isfunction) if inspect.isclass(thing) else [("", thing)]
            )
            for name, function in members:
                if inspect.isfunction(function) and not name.startswith("_"):
                    parameters = inspect.signature(function).parameters
                    if argument in parameters and function.__module__.startswith("pyro_dvi"):
                        found[f"{function.__module__}.{function.__qualname__}"] = parameters[argument]
    return found


@pytest.mark.parametrize("argument, count", [("progress", 8), ("seed", 20)])
def test_it_is_given_by_name_only(argument, count):
    found = public(argument)
    assert len(found) >= count
    assert [name for name, p in found.items() if p.kind is not p.KEYWORD_ONLY] == []


def test_there_is_a_bar_unless_it_is_switched_off():
    assert {name: p.default for name, p in public("progress").items() if p.default is not True} == {}


def test_fits_repeat_and_draws_follow_the_global_generator():
    abstract = "pyro_dvi.laplace.methods.method.Method.fit"
    for name, parameter in public("seed").items():
        expected = 0 if name.rpartition(".")[2] in FITS else None
        assert name == abstract or parameter.default == expected, name
