"""What can go wrong in the predictor.

PredictorError
├── CorruptModel   the saved model is damaged: set aside, start cold
│   └── OtherLayout    ... or of another version: set aside, and taken up again by that version
└── BadData        training data without the columns, or without rows: correct the input
"""


class PredictorError(Exception):
    """Root of the predictor's errors."""


class CorruptModel(PredictorError):
    """A saved model that cannot be read."""


class OtherLayout(CorruptModel):
    """A saved model of another version: whole, but not for this one."""

    def __init__(self, layout: int, expected: int) -> None:
        super().__init__(f"layout {layout}, this version reads {expected}")
        self.layout = layout


class BadData(PredictorError):
    """Training data that cannot be used; the message has what is missing and where."""
