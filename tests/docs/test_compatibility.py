# SPDX-License-Identifier: Apache-2.0
"""The tables of what goes with what: every pair works or says why not, and what the library recommends works."""

import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # the tables train every pair

ROOT = Path(__file__).parents[2]
OBJECTIVES = ("TaylorELBO", "MomentPropagationELBO", "NaturalGradientELBO", "SampledELBO")
WAY_OUT = re.compile(r"\b(use|take|train|predict with|give|goes with|init_loc_fn=|method=)", re.IGNORECASE)


@pytest.fixture(scope="module")
def compatibility():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import compatibility
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return compatibility


@pytest.fixture(scope="module")
def tables(compatibility):
    """Errors that are not the library's own are not caught there, and fail here."""
    return compatibility.tables()


def test_every_warning_and_refusal_names_a_way_out(tables):
    said = {pair: text for table in tables for pair, text in table.cells.items() if text}
    assert {pair: text for pair, text in said.items() if not WAY_OUT.search(text)} == {}
    assert all(text.startswith(("warns: ", "refused: ")) for text in said.values())
    assert len(said) > 40


def test_what_the_library_recommends_works(compatibility, tables):
    objectives, optimizers, rules = (table.cells for table in tables)
    assert {pair: objectives[pair] for pair in compatibility.TRAINED_BY.items() if objectives[pair]} == {}
    for objective in OBJECTIVES:
        suited = (
            ("VOGN", "OGN", "IVON", "NoisyKFAC")
            if objective == "NaturalGradientELBO"
            else ("dvi.optim.Adam", "dvi.optim.SGD")
        )
        assert [optimizers[name, objective] for name in suited if optimizers[name, objective]] == []
    default = {
        "MultiplicativeNoiseGuide": "Moments()",
        "LaplaceGuide": "Linearised()",
        "NaturalGradientGuide": "Samples(n)",
        "KroneckerGuide": "Samples(n)",
    }
    for guide in ("MeanFieldGuide", "LastLayerGuide", "EnsembleGuide"):
        default[guide] = "Moments()" if guide == "LastLayerGuide" else "AtMean()"
    assert {pair: rules[pair] for pair in default.items() if rules[pair]} == {}


def test_the_width_of_a_laplace_approximation_is_not_that_of_its_training(tables):
    said = tables[2].cells["LaplaceGuide", "Samples(n)"]
    assert "Linearised()" in said and "TaylorELBO" not in said


def test_natural_gradients_and_other_training_do_not_mix(compatibility, tables):
    """Where only one of objective, guide and optimizer is of natural gradients, nothing is trained."""
    objectives, optimizers, _ = (table.cells for table in tables)
    for (guide, objective), said in objectives.items():
        if (guide in ("NaturalGradientGuide", "KroneckerGuide")) != (objective == "NaturalGradientELBO"):
            assert said.startswith("refused: "), (guide, objective)
    for (optimizer, objective), said in optimizers.items():
        if (optimizer in ("VOGN", "OGN", "IVON", "NoisyKFAC")) != (objective == "NaturalGradientELBO"):
            assert said.startswith("refused: "), (optimizer, objective)


def test_the_page_has_every_pair_and_explains_its_numbers(compatibility, tables):
    text = compatibility.page(tables)
    cells = re.findall(r"\| (?:yes|(?:warns|refused) \[\d+\]) (?=\|)", text)
    assert len(cells) == sum(len(table.cells) for table in tables)
    cited = {int(number) for number in re.findall(r"(?:warns|refused) \[(\d+)\]", text)}
    notes = {int(number) for number in re.findall(r"^(\d+)\. \S", text, re.MULTILINE)}
    assert cited == notes
