//! The adapter from outside. One binary, since each compiles the engine again.
#![allow(missing_docs)]

#[allow(unsafe_code, reason = "reads and writes the memory of translations")]
mod address_space;
mod bugs;
mod common;
mod threads;
