output "inventory" {
  description = "What to give to `rapidraid-cluster run --on`"
  value       = var.inventory
}

output "hosts" {
  description = "Public addresses, the client last"
  value       = aws_instance.host[*].public_ip
}
