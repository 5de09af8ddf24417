// Of the library, and of the contract of its operations (clover_trt/graph/contract.py): a builder refuses another one.
#pragma once

#define CLOVER_PLUGINS_VERSION "clover-plugins 0.1.0 contract 1"
