"""What page and terminal say in words."""

import pytest

from gradlane.cli.arm_labels import labels
from gradlane.report.read import document_of
from gradlane.report.verdict import verdict

from ..support.report_samples import bench_document, train_document


def said(document):
    return verdict(document_of(document, "x.json"))


def trained(**changes):
    """Two arms, with the figures that the verdict reads."""
    document = train_document()
    kept = document["results"][:2]
    document["results"] = kept
    document["target"], document["unit"] = 4.0, "bits per byte"
    dense, other = kept
    dense |= {"status": "ok", "to_target_s": 10.0, "to_target_bytes": 8e6, "gap": 0.0}
    other |= {"status": "ok", "to_target_s": 5.0, "to_target_bytes": 1e6, "gap": 0.001, **changes}
    return document


def test_the_arm_that_is_first_at_the_target_is_named_with_what_it_saves():
    first, second, *_ = said(trained())
    assert first == (
        "Cast(Mean(), bfloat16) reached 4.00 bits per byte 2.0 times sooner than plain DDP and sent 8.0 "
        "times fewer bytes."
    )
    assert second == "No arm ends more than 0.02 above dense training."


def test_where_nothing_is_sooner_it_says_so():
    (sentence, *_) = said(trained(to_target_s=12.5))
    assert sentence.startswith("No arm reached 4.00 bits per byte sooner than plain DDP on this link.")
    assert "Cast(Mean(), bfloat16), took 1.25 times as long" in sentence


def test_a_loss_that_is_higher_is_named():
    assert "Above the final loss of dense training is Cast(Mean(), bfloat16) by 0.080." in said(
        trained(gap=0.08)
    )


def test_arms_that_failed_and_runs_without_dense_training_say_nothing():
    assert said(trained(status="crashed")) == []
    document = trained()
    del document["results"][0]
    assert said(document) == []


def test_a_bench_says_for_each_link_what_is_fastest():
    sentences = said(bench_document())
    assert len(sentences) == 3
    assert sentences[2].startswith("At 100mbit, 2 ranks: a step with ErrorFeedback(TopK(0.01)) is ")
    assert "compute alone is at" in sentences[2]


@pytest.mark.parametrize(("room", "explained"), [(40, 0), (5, 2)])
def test_names_become_letters_where_they_do_not_fit(room, explained):
    shown, legend = labels(["ddp", "Cast(Mean(), bfloat16)"], room)
    assert len(legend) == explained
    assert all(len(name) <= room for name in shown)
    assert not legend or legend[1] == "B  Cast(Mean(), bfloat16)"
