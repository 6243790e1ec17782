#define LEVEL PORTABLE
#include "codecs_level.h"
