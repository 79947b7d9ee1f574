// The instructions of Intel's matrix registers (AMX).

#pragma once

#ifdef BATCHINFER_AMX

#include <cstdint>

namespace {

constexpr int kTileRows = 16, kTileBytes = 64;

// As assembler, because the intrinsics of some compilers do not say which memory they read.

template <int kTo>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTo) : "memory");
}
// The same for what is not read again soon: it should not drive out what is.
template <int kTo>
inline void stream_tile(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTo) : "memory");
}
template <int kFrom>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kFrom) : "memory");
}
template <int kTo>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kTo));
}

enum class Kind { kBf16, kSignedByUnsigned, kUnsignedBySigned, kUnsigned };

// kSum += kA . kB
template <Kind kKind, int kSum, int kA, int kB>
inline void multiply_tiles() {
  if constexpr (kKind == Kind::kBf16)
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  else if constexpr (kKind == Kind::kSignedByUnsigned)
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  else if constexpr (kKind == Kind::kUnsignedBySigned)
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
  else
    asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kA), "i"(kB));
}

// The shapes of a thread's registers. 0 to 3 are sums, 4 and 5 rows, 6 and 7 what the rows are multiplied by; 0 and 1 are sums
// of the rows in 4, 2 and 3 of those in 5. Released at the end, so that whoever uses them next finds them as after a start.
class TileShapes {
 public:
  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
  ~TileShapes() {
    if (first_) asm volatile("tilerelease");
  }

  void set_rows(int rows) { set_rows(rows, rows); }

  // The number of rows in 4 and in 5, at least 1 each.
  void set_rows(int first, int second) {
    if (first == first_ && second == second_) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    const int rows[] = {first, first, second, second, first, second, kTileRows, kTileRows};
    for (int i = 0; i < 8; ++i) {
      shapes.row_bytes[i] = kTileBytes;
      shapes.rows[i] = uint8_t(rows[i]);
    }
    asm volatile("ldtilecfg %0" ::"m"(shapes));
    first_ = first, second_ = second;
  }

 private:
  int first_ = 0, second_ = 0;
};

}  // namespace

#endif
