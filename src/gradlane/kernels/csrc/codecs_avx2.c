#define LEVEL AVX2
#include "codecs_level.h"
