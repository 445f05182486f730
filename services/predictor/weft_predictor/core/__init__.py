# pyright: reportUnusedImport=false
"""Pure: values in, predictions out.

Tests, the simulator and benchmarks take these names from here: the modules behind them may change.
"""

from weft_predictor.core.conformal import ConformalCalibrator, ConformalCalibrators
from weft_predictor.core.encoder import Encoder, EncoderClasses, EncoderShape
from weft_predictor.core.features import Features, Featurizer
from weft_predictor.core.length_model import LengthModel, ObservationResult
from weft_predictor.core.offsets import Offsets
from weft_predictor.core.promotion import PromotedModel
from weft_predictor.core.replayed_lengths import ReplayedLengths
from weft_predictor.core.residual_scale import ResidualScale
from weft_predictor.core.retraining import AnsweredIds, Retraining, TrainingSet
from weft_predictor.core.ridge import Ridge
from weft_predictor.core.ridge_model import RidgeModel
