//! Software machine.
