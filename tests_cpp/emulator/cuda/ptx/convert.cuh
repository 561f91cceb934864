// Emulates src/cuda/ptx/convert.cuh: empty, since device code is compiled as for a GPU before sm_89 here.
#pragma once
