"""Labels of metrics that name what people name: bounded, the first ones have their own."""

OTHER = "other"


class BoundedLabels:
    """A label for each of the first `most` names, and one for all the others."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.names = set[str]()  # that have their own

    def of(self, name: str) -> str:
        if name not in self.names:
            if len(self.names) >= self._most:
                return OTHER
            self.names.add(name)
        return name
