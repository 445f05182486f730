"""What can go wrong in the predictor.

PredictorError
├── CorruptModel   the saved model is damaged or of another layout: set aside, start cold
└── BadData        training data without the columns, or without rows: correct the input
"""


class PredictorError(Exception):
    """Root of the predictor's errors."""


class CorruptModel(PredictorError):
    """A saved model that cannot be read."""


class BadData(PredictorError):
    """Training data that cannot be used; the message has what is missing and where."""
