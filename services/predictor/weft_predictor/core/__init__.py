# pyright: reportUnusedImport=false
"""The pure part: values in, predictions out.

Other packages import names from here only: the modules of this package may change.
"""

from weft_predictor.core.conformal import MIN_LEVEL, OWN_SCORES, PRIOR_SCORES, ConformalCalibrator, ConformalCalibrators
from weft_predictor.core.encoder import Encoder, EncoderClasses, EncoderShape, class_of, deciles, tenths
from weft_predictor.core.feature_cache import FeatureCache
from weft_predictor.core.features import MAX_CHARS, Features, Featurizer, HashedGrams, feature_rows
from weft_predictor.core.length_model import TARGET, Arrays, LengthModel, ObservationResult
from weft_predictor.core.offsets import SHRINK_K, Group, Offsets, shrunk_median
from weft_predictor.core.promotion import MAX_JUDGED, MIN_JUDGED, Judge, PromotedModel
from weft_predictor.core.replayed_lengths import ReplayedLengths
from weft_predictor.core.residual_scale import ResidualScale
from weft_predictor.core.ridge import RIDGE, VARIANCE_FLOOR, Ridge
from weft_predictor.core.ridge_model import COLD_SCALE, DIM, RidgeModel
