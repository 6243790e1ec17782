"""One JSON object and its place in the file, so that an error can name both."""

from __future__ import annotations

from ..errors import InvalidValue

WAY_OUT = "use a whole file that `gradlane bench` or `gradlane train` wrote"
LARGEST = 1e300  # what is not below it, infinity and NaN too, is no figure one can draw


class Fields:
    """Typed access to the values of a JSON object; what is of another type is refused by name."""

    def __init__(self, values: object, place: str) -> None:
        if not isinstance(values, dict):
            raise InvalidValue(f"{place} is {_shown(values)}, not an object; {WAY_OUT}")
        self.values: dict[str, object] = values
        self.place = place

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self._refused(key, value, "text")
        return value

    def number(self, key: str) -> float | None:
        """None for null, and for a key that is not there: a figure that was not taken."""
        return self._number(key, self.values.get(key))

    def whole(self, key: str) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refused(key, value, "a whole number")
        return value

    def flag(self, key: str) -> bool:
        return bool(self.values.get(key))

    def numbers(self, key: str) -> tuple[float | None, ...]:
        return tuple(self._number(key, value) for value in self._list(key))

    def inner(self, key: str) -> Fields:
        return Fields(self.values.get(key, {}), f"{self.place}: {key}")

    def each(self, key: str) -> list[Fields]:
        """The objects of a list; null or no list at all is an empty one."""
        return [Fields(value, f"{self.place}: {key}[{at}]") for at, value in enumerate(self._list(key))]

    def _list(self, key: str) -> list[object]:
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._refused(key, value, "a list")
        return value

    def _number(self, key: str, value: object) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(key, value, "a number or null")
        return float(value) if abs(value) < LARGEST else None

    def _refused(self, key: str, value: object, wanted: str) -> InvalidValue:
        return InvalidValue(f"{self.place}: {key} is {_shown(value)}, not {wanted}; {WAY_OUT}")


def _shown(value: object) -> str:
    if value is None:
        return "missing or null"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
