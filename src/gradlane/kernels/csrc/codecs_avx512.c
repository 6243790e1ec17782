#define LEVEL AVX512
#include "codecs_level.h"
