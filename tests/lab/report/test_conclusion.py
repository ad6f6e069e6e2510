"""What a report concludes, and that a difference within the noise is called so."""

import pytest

from papa.lab.report.conclusion import Difference, conclusion, paired
from papa.lab.report.page import compare_page, run_page
from papa.lab.report.words import verdict_text
from report_samples import METRICS, make_full_result, make_result


def with_soups(method: str, soups: list[float]) -> list[dict]:
    results = [make_result(method, seed) for seed in range(1, len(soups) + 1)]
    for result, soup in zip(results, soups, strict=True):
        result["test"]["average_soup"] = soup
    return results


INDEPENDENT = with_soups("independent", [10.0, 10.0, 10.0])


def test_a_clear_gain_is_said_with_its_spread_and_beside_the_ensemble() -> None:
    sentence = conclusion([*INDEPENDENT, *with_soups("papa", [93.0, 93.5, 94.0])])
    assert sentence == (
        "papa gives a better network than one independent network: its average soup has 93.5 ± 0.5% accuracy on test "
        "data, 2.5 ± 0.5 points better than one independent network (3 seeds). The ensemble of 2 independent networks "
        "has 93.0 ± 0.0%, 0.5 ± 0.5 points worse, within the noise."
    )
    page = compare_page([*INDEPENDENT, *with_soups("papa", [93.0, 93.5, 94.0])])
    assert page.index(sentence) < page.index("<svg")


@pytest.mark.parametrize(
    ("soups", "first"),
    [
        (
            [90.0, 91.0, 93.0],
            "No gain can be told from noise: the best average soup, of papa, has 91.3 ± 1.5%",
        ),
        ([80.0, 80.5, 81.0], "Averaging does not pay here: the best average soup, of papa, has 80.5 ± 0.5% accuracy"),
        ([93.0], "The average soup of papa, one network, has 93.0% accuracy on test data, 2.0 points better than one"),
        ([91.0], "The average soup of papa, one network, has 91.0% accuracy on test data, as good as one independent"),
    ],
)
def test_noise_harm_and_a_single_seed_are_called_so(soups: list[float], first: str) -> None:
    sentence = conclusion([*INDEPENDENT, *with_soups("papa", soups)])
    assert sentence.startswith(first)
    assert ("within the noise of 3 seeds" in sentence) == first.startswith("No gain")
    assert ("one seed cannot tell that from noise" in sentence) == (len(soups) == 1)


def test_longer_training_is_compared_too() -> None:
    longer = with_soups("longer", [95.0, 95.5, 96.0])
    for result in longer:
        result["test"] |= {"members": [95.0], "mean": 95.5}
        result["config"] = {**result["config"], "members": 1}
    sentence = conclusion([*INDEPENDENT, *longer, *with_soups("papa", [93.0, 93.5, 94.0])])
    assert sentence.startswith("papa gives a better network")
    assert sentence.endswith("One network that trained longer has 95.5 ± 0.0%, 2.0 ± 0.5 points better.")


def test_without_independent_members_a_soup_is_compared_with_its_own() -> None:
    sentence = conclusion([make_result("papa"), make_result("papa-all", shift=0.5)])
    assert "papa-all, one network, has 93.0% accuracy on test data, 1.5 points better than one of its own" in sentence
    assert sentence.endswith("There are no independent members here to compare with.")
    page = run_page(make_result("papa"), METRICS)
    assert "The ensemble of 2 of the same networks has 93.0%, 0.5 points better." in page
    assert "no independent members" not in page
    assert conclusion([{"method": "papa"}]) == ""


def test_the_interval_is_students() -> None:
    # Of three values with a standard deviation of 1 it reaches 2.48 to each side of their mean.
    for mean, is_clear in ((2.5, True), (2.4, False), (-2.5, True)):
        assert Difference({seed: mean + seed - 2 for seed in (1, 2, 3)}).is_clear == is_clear
    assert not Difference({1: 5.0}).is_clear
    assert not Difference({1: 5.0, 2: None}).is_clear
    assert paired({1: 5.0}, {2: 5.0}) is None


def test_the_page_of_a_run_begins_with_the_verdict_of_its_training() -> None:
    result = make_full_result()
    said = (
        "It helps: the soup is better than its members. Keep the strength. The average soup&#39;s loss is 0.25, 0.05 "
        "lower than that of one member (standard error 0.01, 1,200 validation examples). The average soup of papa-all"
    )
    assert f'<p class="summary">{said}' in run_page(result, METRICS)
    result["verdict"]["gain"]["mean"] = None
    assert verdict_text(result).endswith("The average soup's loss is not finite.")
    assert verdict_text({**result, "verdict": None}) == ""
