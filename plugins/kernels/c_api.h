// The launchers by C name, for callers that load the library at run time (clover_trt/kernels.py).
// Shapes and arguments are the structures of the kernels' own headers; a status of 0 is success.
#pragma once

#include <stddef.h>

extern "C" {

// Types of a kernel's main tensors.
enum clover_type { CLOVER_FLOAT32 = 0, CLOVER_BFLOAT16 = 1, CLOVER_E4M3 = 2, CLOVER_E2M1 = 3 };

const char* clover_plugins_version();

// What the kernels expect of a shape, or null when they can run it.
const char* clover_gdn_unsupported(const void* shape);
const char* clover_moe_unsupported(int type, const void* shape);
const char* clover_head_unsupported(const void* shape);

size_t clover_gdn_workspace(const void* shape);
size_t clover_moe_workspace(int type, const void* shape);
size_t clover_head_workspace(const void* shape);

int clover_gdn_block_scan(int type, const void* shape, const void* arguments, void* workspace, void* stream);
int clover_expert_subset_moe(int type, const void* shape, const void* arguments, void* workspace, void* stream);
int clover_confidence_head(const void* shape, const void* arguments, void* workspace, void* stream);
}
