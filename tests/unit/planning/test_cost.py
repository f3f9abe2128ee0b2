"""Costs against sums by hand."""

import pytest

from soloist.errors import SettingError
from soloist.planning.cost import ApiPrices, Machine, read_api_prices, read_machine


def test_a_machine_by_the_hour() -> None:
    # 36 an hour is one cent a second; half of the time it waits, which doubles that.
    assert Machine(36.0, 1.0).cost(2.5) == pytest.approx(0.025)
    assert Machine(36.0, 0.5).cost(2.5) == pytest.approx(0.05)
    # 1,000 tokens at 1,000 tokens/s on 8 GPUs at 3.50 an hour each: 28 / 3600.
    assert Machine(8 * 3.5, 1.0).cost(1000 / 1000) == pytest.approx(0.0077778, rel=1e-4)


def test_an_api_by_tokens() -> None:
    prices = ApiPrices(prompt=0.6, cached=0.06, new=2.4)
    assert prices.cost(10_000, 8_000, 500) == pytest.approx(0.0012 + 0.00048 + 0.0012)
    assert prices.cost(0, 0, 1000) == pytest.approx(0.0024)


def test_prices_as_people_write_them() -> None:
    assert read_api_prices("0.6/2.4") == ApiPrices(0.6, 0.6, 2.4)
    assert read_api_prices("3/0.3/15") == ApiPrices(3.0, 0.3, 15.0)
    for wrong in ("3", "a/b", "1/2/3/4", "-1/2", "1/nan", "", "1/inf"):
        with pytest.raises(SettingError, match="PROMPT/NEW"):
            read_api_prices(wrong)


@pytest.mark.parametrize(
    ("price", "utilisation", "named"), [(-1, 1, "--price"), (1, 0, "--util"), (1, 1.1, "--util")]
)
def test_what_is_no_machine(price: float, utilisation: float, named: str) -> None:
    with pytest.raises(SettingError, match=named):
        read_machine(price, utilisation)
