"""The errors of the predictor.

PredictorError
├── CorruptModel   the saved model is damaged: set aside, start cold
│   └── OtherLayout    ... or of another version: set aside, and taken up again by that version
└── BadData        training data without the columns, or without rows: correct the input
"""


class PredictorError(Exception):
    """Root of the predictor's errors."""


class CorruptModel(PredictorError):
    """A saved model with unreadable or damaged content."""


class OtherLayout(CorruptModel):
    """An undamaged saved model with the layout of another version."""

    def __init__(self, layout: int, known_layout: int) -> None:
        super().__init__(f"layout {layout}, this version reads {known_layout}")
        self.layout = layout


class BadData(PredictorError):
    """Unusable training data. The message says which part is missing and its place."""
