"""Operations per device."""
