// How values are held, and how integers of weights are multiplied by them. Included by grouped.h.

// Sums of products of integers.
struct Integers {
  using Sum = int32_t;
  using Sums = IntRegister;
  // The most registers whose products may be added in lanes of 16 bits, if any.
  template <int kBits>
  static constexpr int kMostInShorts = 0;

  // Return sums less their offsets, given the sums of values, or the products of both.
  static TPC_INLINE Register less(Sums total, IntRegister offsets, const Sum* sums) {
    return numbers(total - offsets * load_bytes<IntRegister>(sums));
  }
  static TPC_INLINE Register less(Sums total, const Sum* products) {
    return numbers(total - load_bytes<IntRegister>(products));
  }

  static TPC_INLINE Register numbers(Sums total) {
    return __builtin_convertvector(total, Register);
  }

  static TPC_INLINE Register of_sums(const Sum* sums) {
    return numbers(load_bytes<IntRegister>(sums));
  }
};

// An arithmetic: how values are held, and how the integers of a load become parts that they are
// multiplied by. The integers of a part are raised by `raised`, depending on their bits. This one
// has values of 16 bits.
struct Exact : Integers {
  using Value = int16_t;
  static constexpr int kBitsOfValues = 16;
  static constexpr int32_t raised(int bits) { return bits == 8 ? 0 : 1 << (bits - 1); }

  template <int kBits>
  static TPC_INLINE ShortRegister part(ShortRegister loaded, int number) {
    if constexpr (kBits == 8) return (number ? loaded : loaded << 8) >> 8;
    const auto integers = (ShortRegister)((WordRegister)loaded >> (4 * number));
    return number < 3 ? integers & 15 : integers;
  }

  template <int kBits>
  static TPC_INLINE Sums multiply(Sums total, ShortRegister weight, ShortRegister x) {
    return multiply_add(total, weight, x);
  }
};

// Values as integers of 8 bits.
struct Bytes : Integers {
  using Value = int8_t;
  static constexpr int kBitsOfValues = 8;
  static constexpr int32_t raised(int bits) { return raised_bytes(bits); }

  template <int kBits>
  static TPC_INLINE ShortRegister part(ShortRegister loaded, int number) {
    constexpr int16_t kNibbles = 0x0f0f, kHighest = static_cast<int16_t>(0x8080);
    if constexpr (kBits == 4) return (number ? loaded >> 4 : loaded) & kNibbles;
    else return kSignedBytes ? loaded : loaded ^ kHighest;
  }

  template <int kBits>
  static TPC_INLINE Sums multiply(Sums total, ShortRegister weight, ShortRegister x) {
    return multiply_bytes<kBits == 8 && kSignedBytes>(total, weight, x);
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  // Each part of a register adds two products to a lane of 16 bits.
  template <int kBits>
  static constexpr int kMostInShorts =
      kBits == 8 ? 0 : 32767 / (2 * (kBitsOfValues / kLow<kBits>) * 127 * ((1 << kBits) - 1));

  static TPC_INLINE Sums add_in_shorts(Sums a, Sums b) {
    return (Sums)((ShortRegister)a + (ShortRegister)b);
  }

  static TPC_INLINE Sums multiply_in_shorts(Sums total, ShortRegister weight, ShortRegister x) {
    return add_in_shorts(total, (Sums)_mm256_maddubs_epi16((__m256i)weight, (__m256i)x));
  }

  static TPC_INLINE Sums widened(Sums shorts) {
    return (Sums)_mm256_madd_epi16((__m256i)shorts, _mm256_set1_epi16(1));
  }
#endif
};

// Values in fp32, those of even lanes before those of odd ones.
struct Wide {
  using Value = float;
  using Sum = float;
  using Sums = Register;
  template <int kBits>
  static constexpr int kMostInShorts = 0;
  static constexpr int kBitsOfValues = 16;  // of their columns in a register
  static constexpr int32_t raised(int bits) { return Exact::raised(bits); }

  template <int kBits>
  static TPC_INLINE ShortRegister part(ShortRegister loaded, int number) {
    return Exact::part<kBits>(loaded, number);
  }

  static TPC_INLINE Sums add(Sums total, ShortRegister weight, const Value* x) {
    const auto pairs = (IntRegister)weight;
    const Register even = __builtin_convertvector((pairs << 16) >> 16, Register);
    const Register odd = __builtin_convertvector(pairs >> 16, Register);
    total = multiply_add(total, even, load_register(x));
    return multiply_add(total, odd, load_register(x + kLanes));
  }

  static TPC_INLINE Register less(Sums total, IntRegister offsets, const Sum* sums) {
    return total - __builtin_convertvector(offsets, Register) * load_register(sums);
  }
  static TPC_INLINE Register less(Sums total, const Sum* products) {
    return total - load_register(products);
  }

  static TPC_INLINE Register numbers(Sums total) { return total; }

  static TPC_INLINE Register of_sums(const Sum* sums) { return load_register(sums); }
};

// The parts of a load, and the columns of a part.
template <class A, int kBits>
constexpr int kParts = A::kBitsOfValues / kLow<kBits>;
template <class A, int kBits>
constexpr int64_t kOfPart = kColumns<kBits> / kParts<A, kBits>;

// The bits of a load that are apart, those of four columns in each lane of 16 bits: of the first
// column at bit 4, and of the third at bit 12. Those of the second and fourth are after them.
typedef uint8_t Half __attribute__((vector_size(2 * kRegister)));

template <int kBits>
TPC_INLINE WordRegister load_high(const char* source) {
  WordRegister bits;
  if constexpr (kHigh<kBits> == 2) {
    bits = __builtin_convertvector(load_bytes<Half>(source), WordRegister);
  } else {
    const IntRegister pairs = load_register(reinterpret_cast<const uint8_t*>(source));
    bits = (WordRegister)((pairs | pairs << 12) & 0x000f000f);
  }
  return bits << 4 | bits << (12 - 2 * kHigh<kBits>);
}

// A register of weights, in parts.
template <class A, int kBits>
class Parts {
 public:
  TPC_INLINE Parts(const char* source, const char* high) : first_(kept(load_shorts(source))) {
    if constexpr (kHigh<kBits> != 0) {
      constexpr uint16_t kOnes = ((1 << kHigh<kBits>) - 1) << 4, kPlaces = kOnes | kOnes << 8;
      const auto low = (WordRegister)first_, upper = load_high<kBits>(high);
      first_ = kept((ShortRegister)((low & 0x0f0f) | (upper & kPlaces)));
      second_ = kept((ShortRegister)((low >> 4 & 0x0f0f) | (upper >> kHigh<kBits> & kPlaces)));
    }
  }

  TPC_INLINE ShortRegister operator[](int number) const {
    if constexpr (kHigh<kBits> == 0) return A::template part<kBits>(first_, number);
    const ShortRegister integers = number % 2 ? second_ : first_;
    if constexpr (std::is_same_v<A, Bytes>) return integers;
    return number < 2 ? integers & 0xff : (ShortRegister)((WordRegister)integers >> 8);
  }

 private:
  ShortRegister first_, second_;  // bytes of every second column, if bits are apart
};

// Products of values in T and weights of few bits. See grouped_values.h for how values are
// laid out.
template <class T>
struct Form<T, Grouped> {
  using Weights = Grouped;
  using Value = float;
  using Arithmetic = Exact;
};

template <>
struct Form<f32, Grouped> {
  using Weights = Grouped;
  using Value = float;
  using Arithmetic = Wide;
};

// Weights of linears that round their values to 8 bits.
struct Rounding : Grouped {
  using Grouped::Grouped;
};

template <class T>
struct Form<T, Rounding> {
  using Weights = Rounding;
  using Value = float;
  using Arithmetic = Bytes;
};
