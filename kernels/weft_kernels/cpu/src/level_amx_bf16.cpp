#define WEFT_LEVEL 4
#define WEFT_NAME AmxBf16
#include "level_impl.h"
