# SPDX-License-Identifier: Apache-2.0
# The CUDA shim: libcudart.so.13 and libcuda.so.1 over libvsm.so. Included by the Makefile.

SHIM_EXTRA := $(wildcard src/fatbin/*.cpp src/model/*.cpp)
SHIM_OBJECTS += $(SHIM_EXTRA:src/%.cpp=$(BUILD)/obj/%.o)
FORWARD := $(wildcard src/shim/libcuda/*.cpp)
FORWARD_OBJECTS := $(FORWARD:src/%.cpp=$(BUILD)/obj/%.o)

shim: $(BUILD)/shim/libcudart.so.13 $(BUILD)/shim/libcuda.so.1

# -Bsymbolic: the shim's calls to its own cuda* names stay in it, whatever else is loaded.
$(BUILD)/shim/libcudart.so.13: $(SHIM_OBJECTS) $(BUILD)/libvsm.so src/shim/libcudart.map
	@mkdir -p $(@D)
	$(CXX) -shared -pthread -Wl,-soname,libcudart.so.13 -Wl,--version-script=src/shim/libcudart.map -Wl,-Bsymbolic \
	  -Wl,-rpath,'$$ORIGIN/..' $(LDFLAGS) -o $@ $(SHIM_OBJECTS) $(BUILD)/libvsm.so

$(BUILD)/shim/libcuda.so.1: $(FORWARD_OBJECTS) $(BUILD)/shim/libcudart.so.13
	$(CXX) -shared -Wl,-soname,libcuda.so.1 -Wl,-rpath,'$$ORIGIN' $(LDFLAGS) -o $@ $^

-include $(FORWARD_OBJECTS:.o=.d)
