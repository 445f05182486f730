"""The predictor's metrics. No label has more than a handful of values."""

from prometheus_client import Counter, Gauge, Histogram

LEADER = Gauge("weft_predictor_leader", "1 while this process acts, 0 while it stands by")
PREDICTIONS = Counter("weft_predictor_predictions_total", "Prompts predicted")
PREDICT_SECONDS = Histogram(
    "weft_predictor_predict_seconds",
    "Time of a Predict call of any batch size",
    buckets=(0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25),
)
OUTCOMES = Counter(
    "weft_predictor_outcomes_total",
    "Outcomes received: learned; partial (features gone: taught offset and calibration); without effect: censored "
    "(a low lower bound), unknown (neither features nor a prediction of this model), duplicate",
    ["result"],
)
COVERAGE = Gauge("weft_predictor_coverage_ratio", "Share of the latest 1,000 outcomes covered by p90 (target 0.9)")
MODELS = Counter(
    "weft_predictor_models_total",
    "Models offered as candidates, promoted or dropped on outcomes new to both models, and refused files",
    ["result"],
)
SAVES = Counter("weft_predictor_saves_total", "Model saves", ["result"])
ADAPTERS = Gauge("weft_predictor_adapters", "Adapters with a separate offset")
