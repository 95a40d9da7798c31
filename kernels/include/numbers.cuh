// numbers.cuh: constants that a host compiler gets from <math.h> and that NVRTC, which has no host headers, lacks.
#pragma once

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
