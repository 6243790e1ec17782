"""``Auto`` in every framework: the framework's own tests, with a strategy that changes in mid-run."""

from importlib import import_module

import pytest

from . import launched

AUTO = (
    "Auto(among=['Sharded(Int8())', 'ErrorFeedback(Gathered(TopK(0.2)))', 'Cast(Mean(), bfloat16)'], "
    "replay={1: 'ErrorFeedback(Gathered(TopK(0.2)))', 4: 'Mean()', 5: 'Sharded(Int8())', "
    "7: 'ErrorFeedback(Gathered(TopK(0.2)))', 11: 'Cast(Mean(), bfloat16)', 13: 'Mean()'})"
)


@pytest.fixture
def auto(monkeypatch):
    changed = []

    def of(name):
        tests = import_module(f"{__package__}.{name}")
        for module in (tests, launched):
            monkeypatch.setattr(module, "MEMORY", AUTO)
            module.reference.cache_clear()
            changed.append(module)
        return tests

    yield of
    for module in changed:  # what it keeps was trained with another strategy
        module.reference.cache_clear()


def test_lightning(auto, tmp_path):
    pytest.importorskip("lightning", reason='needs pip install -e ".[lightning]"')
    tests = auto("test_lightning")
    tests.test_it_is_plain_ddp_with_the_same_strategy({}, {}, {})
    tests.test_a_resumed_run_is_the_run_that_never_stopped("last.ckpt", tmp_path)


def test_accelerate(auto, tmp_path):
    pytest.importorskip("accelerate", reason='needs pip install -e ".[accelerate]"')
    tests = auto("test_accelerate")
    tests.test_it_is_plain_ddp_with_the_same_strategy(1, "no", {})
    tests.test_it_is_plain_ddp_with_the_same_strategy(2, "no", {"accumulate": 2})
    tests.test_a_resumed_run_is_the_run_that_never_stopped(tmp_path)


def test_transformers(auto, tmp_path):
    pytest.importorskip("transformers", reason='needs pip install -e ".[transformers]"')
    tests = auto("test_transformers")
    tests.test_it_is_plain_ddp_with_the_same_strategy(1, False, tmp_path / "plain")
    tests.test_a_resumed_run_is_the_run_that_never_stopped(True, tmp_path / "resumed")
